# SPDX-License-Identifier: Apache-2.0
"""A task in a user's own file: the example trains, and what is wrong with a file is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oktopk.lab.runlog.reader import read_runlog
from oktopk.lab.tasks.registry import load_user_task
from task_runs import train

EXAMPLE = Path(__file__).parents[2] / "examples" / "task_regression.py"
WHOLE = EXAMPLE.read_text()


def test_the_example_is_short():
    assert len(WHOLE.splitlines()) < 80


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_learns(tmp_path):
    flags = ("--noise", "0.5", "--width", "64", "--epochs", "6", "--samples", "0")
    done = train(tmp_path, "--task", str(EXAMPLE), *flags)
    assert done.returncode == 0, done.stderr
    assert "4,096 + 512 examples" in done.stdout and "the sparse phase begins" in done.stderr
    assert re.search(r"mean squared error \d+\.\d+, mean absolute error \d+", done.stdout)
    found = re.findall(r"validated after step \d+: mean squared error (\d+\.\d+)", done.stdout)
    kind = load_user_task(str(EXAMPLE))
    targets = kind(kind.options_type(), 0).test_batch(list(range(kind.num_test)))[1]
    assert float(found[-1]) < 0.5 * targets.var().item()  # the error of the best constant
    assert (tmp_path / "runs" / "task_regression" / "report.html").exists()
    assert read_runlog(tmp_path / "runs" / "task_regression")


def changed(old: str, new: str) -> str:
    assert WHOLE.count(old) == 1, old
    return WHOLE.replace(old, new)


TWO = WHOLE + "\n\nclass Another(Task):\n    pass\n"
METRICS = 'metrics = (Metric("mse", "mean squared error"), Metric("mae", "mean absolute error"))'
BAD = {
    "missing": (None, (), "mine.py: there is no such file; give the path of a task to --task"),
    "missing, with flags": (None, ("--noise", "1"), "mine.py: there is no such file; give the"),
    "syntax": ("x = 1\ny = (\n", (), "mine.py: line 2: cannot be imported: SyntaxError: '(' was"),
    "import": (
        "x = 1\n\nimport no_such_package\n",
        (),
        "mine.py: line 3: cannot be imported: ModuleNotFoundError: No module named 'no_such",
    ),
    "raises": (
        "def f():\n    return 1 / 0\n\n\nf()\n",
        (),
        "mine.py: line 2: cannot be imported: ZeroDivisionError: division by zero",
    ),
    "no task": (
        "x = 1\n",
        (),
        "mine.py: must define one class that derives from oktopk's Task; it defines none",
    ),
    "two tasks": (TWO, (), "oktopk's Task; it defines Regression, Another"),
    "abstract": (
        changed("def loss(", "def lost("),
        (),
        "mine.py: Regression lacks loss",
    ),
    "no metrics": (
        changed(METRICS, "metrics = ()"),
        (),
        "mine.py: Regression.metrics must be a tuple of at least one Metric",
    ),
    "not a tuple": (
        changed(METRICS, 'metrics = (Metric("mse"))'),
        (),
        "mine.py: Regression.metrics must be a tuple of at least one Metric",
    ),
    "metric's name": (
        changed('Metric("mse",', 'Metric("m.s.e.",'),
        (),
        "cannot be imported: ValueError: a metric's name must be an identifier, got 'm.s.e.'",
    ),
    "options": (
        changed("options_type = RegressionOptions", "options_type = dict"),
        (),
        "mine.py: Regression.options_type must derive from oktopk's TaskOptions",
    ),
    "no dataclass": (
        changed("@dataclass(frozen=True, kw_only=True, slots=True)\n", ""),
        (),
        "mine.py: RegressionOptions is not a dataclass; add @dataclass(frozen=True, kw_only=True",
    ),
    "taken name": (
        changed("    noise: float = option(", "    density: float = option("),
        (),
        "mine.py: the option density has the name of a setting of the trainer: rename it",
    ),
    "default's value": (
        changed('"lr": 0.003', '"lr": -1'),
        (),
        "mine.py: defaults: lr must be positive, got -1",
    ),
    "default's type": (
        changed('"epochs": 20', '"epochs": 2.5'),
        (),
        "mine.py: defaults: epochs must be a whole number, got 2.5",
    ),
    "default's name": (
        changed('"epochs": 20', '"epoch": 20'),
        (),
        "mine.py: defaults: there is no setting 'epoch'; did you mean 'epochs'?",
    ),
    "defaults": (
        changed("    defaults = {", "    defaults = ['lr'] or {"),
        (),
        'mine.py: Regression.defaults must be a dict, as in {"lr": 0.01}',
    ),
    "metric twice": (
        changed('Metric("mae",', 'Metric("mse",'),
        (),
        "mine.py: Regression.metrics has mse twice",
    ),
    "option's default": (
        changed('1.0, "deviation', 'None, "deviation'),
        (),
        "cannot be imported: ValueError: the default of an option must be text, a number, True or",
    ),
    "option": (WHOLE, ("--noise", "-1"), "noise must be at least 0, got -1.0"),
    "flag": (WHOLE, ("--nois", "1"), "unrecognized arguments: --nois 1; did you mean '--noise'?"),
    "metric": (WHOLE, ("--until", "wer<1"), "this task has no metric 'wer'; it has mse, mae"),
}


@pytest.mark.parametrize("method", ["check", "prepare"])
def test_what_check_and_prepare_raise_is_one_line(tmp_path, oktopk, capsys, method):
    added = f"    @classmethod\n    def {method}(cls, options):\n        {{}}['limit']\n\n"
    (tmp_path / "mine.py").write_text(changed("    def loss(", f"{added}    def loss("))
    assert oktopk("train", "--task", str(tmp_path / "mine.py")) == 1
    said = capsys.readouterr().err
    assert re.search(rf"mine.py: line \d+: {method}: KeyError: 'limit'\n$", said)
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_told_before_anything_starts(name, tmp_path, oktopk, capsys):
    content, flags, message = BAD[name]
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    assert oktopk("train", "--task", str(file), *flags) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said, said
    assert said.count("\n") == 1
    assert said.count("mine.py: ") <= 1
    assert not (tmp_path / "runs").exists()
