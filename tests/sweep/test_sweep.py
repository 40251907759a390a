# SPDX-License-Identifier: Apache-2.0
"""`oktopk sweep`: ranges, budget, continuing, pruning, failures, and what is shown at the end."""

from __future__ import annotations

import importlib.util
import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import browser
import runlogs
from oktopk.lab.sweep import sweep
from oktopk.lab.sweep.results import (
    Range,
    Result,
    as_table,
    best,
    cost,
    history,
    importance,
    parallel,
    parse,
    ranked,
    slices,
    write_report,
)
from oktopk.lab.tasks.base import Metric
from oktopk.lab.train import run_process
from oktopk.lab.train.config import Config
from speech import SMALL

WER = Metric("wer", "WER")

LR = ["--lr", "1e-3:1e-1", "--density", "0.02", "--warmup-steps", "2", "--exact-every", "32"]


@pytest.fixture
def trainer(monkeypatch):
    """Runs whose WER is 20 times lr, at once; or what `acts` makes of them."""
    made = SimpleNamespace(
        configs=[], ended=[], acts=lambda config: runlogs.whole_run(20 * config.lr)
    )

    @contextmanager
    def started(config, base, log):
        made.configs.append(config)
        log.write_text("the disk is full\n")
        entries = made.acts(config)
        runlogs.write(Path(config.runs) / config.name, entries, config)
        how = entries[-1].get("how")  # without an end it goes on for ever
        code = {"finished": 0, "failed": 1}.get(how)
        yield SimpleNamespace(poll=lambda: code, wait=lambda seconds: None)
        made.ended.append(config.name)

    monkeypatch.setattr(run_process, "started", started)
    return made


@pytest.fixture
def call(oktopk):
    return partial(oktopk, "sweep")


def table() -> list[dict]:
    return json.loads(Path("runs/sweep/table.json").read_text())


def test_ranges_and_fixed_values():
    base, space = parse(Config(), {"lr": "1e-4:1e-2", "density": "0.05", "warmup_steps": "0:8"})
    assert base.density == 0.05 and base.lr == Config().lr
    assert space["lr"] == Range(1e-4, 1e-2, True, False)
    assert space["warmup_steps"] == Range(0, 8, False, True)
    assert list(space) == ["lr", "warmup_steps", "exact_every"]
    assert not space["warmup_steps"].has("auto")
    assert "warmup_steps" not in parse(Config(), {})[1]  # auto is not a number to search around
    assert parse(Config(warmup_steps=5), {"warmup_steps": "auto"})[0].warmup_steps == "auto"
    assert parse(Config(warmup_steps=128), {})[1]["warmup_steps"] == Range(0, 256, False, True)
    assert list(parse(Config(method="dense"), {})[1]) == ["lr"]
    assert str(parse(Config(lr=0.01), {})[1]["lr"]) == "0.0025:0.04"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lr", "1e-2:1e-4"], "--lr 1e-2:1e-4: the lower end comes first"),
        (["--lr", "fast"], "--lr 'fast': a range LOW:HIGH of numbers, or a single one"),
        (["--warmup-steps", "0.5:3"], "--warmup-steps '0.5:3': a range LOW:HIGH of whole numbers"),
        (["--density", "0.1:2"], "density must be in (0, 1], got 2.0"),
        (["--weight-decay", "0:1"], "weight_decay is searched by ratio: its range 0:1 must be"),
        (["--trials", "0"], "--trials must be above 0, got 0"),
        (
            ["--lr", "1", "--density", "1", "--warmup-steps", "1", "--exact-every", "1"],
            "nothing to",
        ),
        (["--trails", "3"], "did you mean '--trials'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(trainer, call, capsys, arguments, message):
    assert call(*arguments) == 2
    assert message in capsys.readouterr().err and trainer.configs == []
    assert not Path("runs").exists()  # no plan that a better command would have to fit


def test_folders_of_others_are_left_as_they_are(trainer, call, capsys):
    """A training run's own, a comparison's, and one of runs that belong to neither."""
    for place in ("a", "both/dense", "some/first"):
        runlogs.write(Path("runs") / place, runlogs.whole_run(), Config())
    Path("runs/both/compare.html").write_text("")
    before = sorted(Path("runs").rglob("*"))
    for name, message in {
        "a": "runs/a is the folder of a training run",
        "both": "runs/both is the folder of a comparison (compare.html)",
        "some": "runs/some has runs that are not trials of a sweep (first)",
    }.items():
        assert call(*LR, "--name", name) == 1
        said = capsys.readouterr().err
        assert message in said and "give another --name" in said
    assert sorted(Path("runs").rglob("*")) == before and trainer.configs == []


def test_the_missing_library_is_named(trainer, call, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "optuna" else found(name)
    )
    assert call() == 2
    assert (
        "needs optuna, which is not installed: pip install 'oktopk[sweep]'"
        in capsys.readouterr().err
    )


def test_a_sweep_finds_the_best_and_goes_on(trainer, call, capsys):
    assert call(*LR, "--trials", "3", "--batch", "3") == 0
    assert trainer.configs[0].lr == 0.006  # the config as it stands comes first
    assert len(trainer.configs) == 3 and all(run.batch == 3 for run in trainer.configs)
    assert all(run.density == 0.02 and 1e-3 <= run.lr <= 1e-1 for run in trainer.configs)
    capsys.readouterr()
    assert call(*LR, "--trials", "6", "--batch", "3") == 0  # three more, and other ones
    assert len({run.lr for run in trainer.configs}) == 6
    out = capsys.readouterr().out
    lowest = min(trainer.configs, key=lambda run: run.lr)
    assert table()[0]["trial"] == lowest.name
    assert f"--lr {lowest.lr}" in out.splitlines()[-1] and "--batch 3" in out.splitlines()[-1]
    assert "the best: oktopk train --task speech --runs runs --name sweep-best" in out
    page = Path("runs/sweep/sweep.html").read_text()
    assert "What mattered" in page and "WER against lr" in page
    assert call(*LR, "--trials", "6", "--batch", "3") == 0  # nothing is left to do
    assert len(trainer.configs) == 6


def test_another_sweep_in_the_same_folder_is_refused_by_name(trainer, call, capsys):
    call(*LR, "--trials", "1")
    assert call(*LR, "--trials", "2", "--epochs", "3") == 1
    assert "runs/sweep is a sweep with epochs 15, and this is 3" in capsys.readouterr().err
    assert call(*LR, "--trials", "2", "--lr", "1e-3:1e-2") == 1
    assert "lr 0.001:0.1, and this is 0.001:0.01" in capsys.readouterr().err
    assert len(trainer.configs) == 1


def test_hopeless_trials_are_ended_and_their_checkpoints_go(trainer, call, capsys):
    def acts(config):
        number = int(config.name[-3:])
        if number < 5:
            return runlogs.whole_run(0.2)
        (Path(config.runs) / config.name / "checkpoints").mkdir(parents=True)
        return runlogs.whole_run(0.9)[:-1]  # never ends by itself

    trainer.acts = acts
    assert call(*LR, "--trials", "6") == 0
    assert "trial 005 (6 of 6): ended early" in capsys.readouterr().out
    assert trainer.ended[-1] == "trial-005"
    assert table()[-1]["state"] == "pruned"
    assert not Path("runs/sweep/trial-005/checkpoints").exists()


def test_a_failed_trial_does_not_end_the_sweep_but_many_do(trainer, call, capsys):
    def acts(config):
        good = config.name == "trial-001"
        return runlogs.whole_run() if good else [runlogs.opening(), runlogs.end("failed")]

    trainer.acts = acts
    assert call(*LR, "--trials", "3") == 0
    out = capsys.readouterr().out
    assert "trial 000 (1 of 3): failed: exit code 1" in out and "  | the disk is full" in out
    assert [row["state"] for row in table()] == ["finished", "failed", "failed"]
    assert call(*LR, "--trials", "30") == 0
    assert len(trainer.configs) == 3 + 5
    assert "5 trials failed one after the other" in capsys.readouterr().out


def test_a_trial_that_was_cut_off_goes_on_in_its_folder(trainer, call, capsys, monkeypatch):
    trainer.acts = lambda config: runlogs.whole_run()[:5]
    with monkeypatch.context() as late:
        late.setattr(
            sweep,
            "time",
            SimpleNamespace(monotonic=lambda: float("inf") if trainer.configs else 0.0),
        )
        assert call(*LR, "--trials", "2", "--minutes", "10") == 1
    assert "the time is up; it was saved" in capsys.readouterr().out
    assert [row["state"] for row in table()] == ["half-way"]
    trainer.acts = lambda config: runlogs.whole_run()
    assert call(*LR, "--trials", "2") == 0
    names = [(run.name, run.lr) for run in trainer.configs]
    assert names[0] == names[1] and [name for name, _ in names] == ["trial-000"] * 2 + ["trial-001"]
    assert [row["state"] for row in table()] == ["finished", "finished"]


def test_an_interrupted_sweep_takes_down_what_had_finished(trainer, call):
    """Killed after the run's last word and before Optuna heard of it."""

    def acts(config):
        runlogs.write(Path(config.runs) / config.name, runlogs.whole_run(), config)
        raise KeyboardInterrupt

    trainer.acts = acts
    assert call(*LR, "--trials", "1") == 130
    assert call(*LR, "--trials", "1") == 0
    assert len(trainer.configs) == 1 and [row["state"] for row in table()] == ["finished"]


def result(number: int, state: str, metric: float | None) -> Result:
    values = {"lr": 10.0**-number, "warmup_steps": number}
    name = f"trial-{number:03d}"
    sums = {"steps": 8, "bytes_sent": 100 * number, "ratio": 2.0, "minutes": 1.0}
    return Result(trial=name, state=state, metric=metric, values=values, **sums)


def test_figures_have_a_point_for_every_trial_that_has_a_metric():
    found = [result(1, "finished", 0.5), result(2, "failed", None), result(3, "finished", 0.7)]
    found.append(result(4, "pruned", 0.9))
    space = {"lr": Range(1e-4, 1, True, False), "warmup_steps": Range(0, 9, False, True)}
    (in_order,) = history(found, WER)
    traces = {trace["name"]: trace for trace in in_order.traces}
    assert list(traces) == ["finished", "pruned", "best so far"]  # none that is empty
    assert traces["finished"]["x"] == [0, 2] and traces["pruned"]["y"] == [0.9]
    assert traces["best so far"]["y"] == [0.5, 0.5]
    by_lr, by_warmup = slices(found, space, WER)
    assert by_lr.layout["xaxis"]["type"] == "log" and by_warmup.traces[0]["x"] == [1, 3]
    (lines,) = parallel(found, space, WER)
    assert [trace["name"][-1] for trace in lines.traces] == ["4", "3", "1"]  # the best on top
    assert lines.traces[-1]["y"] == pytest.approx([0.75, 1 / 9, 0], abs=1e-4)
    assert "<br>lr 0.1<br>warmup_steps 1<br>WER 0.500" in lines.traces[-1]["text"]
    assert parallel(found[:2], space, WER) == []
    assert cost(found, WER)[0].traces[0]["x"] == [100, 300]
    unknown = [result(2, "failed", None)]
    assert [*history(unknown, WER), *slices(unknown, space, WER), *cost(unknown, WER)] == []
    assert importance({}) == []
    assert importance({"lr": 0.9, "density": 0.1})[0].traces[0]["y"] == ["density", "lr"]


def test_a_trial_that_diverged_does_not_squash_the_others():
    space = {"lr": Range(1e-4, 1, True, False)}
    found = [result(i, "finished", 0.3 + i / 10) for i in range(4)]
    assert "range" not in history(found, WER)[0].layout["yaxis"]
    found.append(result(4, "pruned", 9.0))
    for figure in (*history(found, WER), *slices(found, space, WER)):
        assert figure.layout["yaxis"]["range"] == pytest.approx([0.255, 1.245])
        assert figure.note == "1 of 5 trials are above 1.2 and not shown."
    (lines,) = parallel(found, space, WER)
    assert lines.traces[-1]["y"][-1] == 0 and max(trace["y"][-1] for trace in lines.traces) == 1
    (alone,) = history(found[4:], WER)  # its colour is that of its state, whoever is there
    assert alone.traces[0]["marker"] == history(found, WER)[0].traces[1]["marker"]


@pytest.mark.skipif(browser.BROWSER is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_draws_the_sweep_and_asks_nobody(tmp_path):
    """Without WebGL too, which a browser without a screen does not have."""
    space = {"lr": Range(1e-5, 1, True, False), "warmup_steps": Range(0, 9, False, True)}
    found = [result(i, "finished", 0.3 + i / 10) for i in range(4)]
    found += [result(4, "pruned", 9.0), result(5, "failed", None)]
    path = tmp_path / "sweep.html"
    write_report(path, found, space, WER, {"lr": 0.9, "warmup_steps": 0.1}, "oktopk train")
    seen = browser.look(path, tmp_path)
    assert seen.console == []
    assert seen.number("drawn") == browser.figures(path) == 6
    assert seen.drawn == 6 and seen.number("requests") == 0


def test_the_best_is_one_that_finished():
    found = [result(1, "pruned", 0.1), result(2, "finished", 0.5), result(3, "finished", 0.3)]
    assert [one.trial[-1] for one in ranked(found, WER)] == ["3", "2", "1"]
    assert best(found, WER) == found[2] and best(found[:1], WER) is None and best([], WER) is None
    assert as_table(found, WER)[1][:5] == ["trial-001", "pruned", "0.100", "0.1", "1"]


@pytest.mark.timeout(240)  # a process that imports torch
@pytest.mark.slow
def test_a_real_trial_from_the_command_line(call, corpus):
    flags = [*SMALL, "--data", corpus, "--workers", "1", "--max-steps", "3", "--trials", "1"]
    assert call(*flags, "--lr", "0.001:0.02", "--exact-every", "1:4") == 0
    (row,) = table()
    assert row["state"] == "finished" and row["steps"] == 3 and row["metric"] is not None
    own = Path("runs/sweep/trial-000/config.toml").read_text()
    assert f"lr = {row['values']['lr']}\n" in own
    assert f"exact_every = {row['values']['exact_every']}\n" in own
    assert Path("runs/sweep/sweep.html").stat().st_size > 1e6
