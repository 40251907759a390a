# SPDX-License-Identifier: Apache-2.0
"""The commands, as a user types them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

import oktopk as oktopk_module
from oktopk import METHODS, __version__
from oktopk.cli import parser
from oktopk.cli.commands import COMMANDS
from oktopk.cli.parser import WIDEST, innermost
from oktopk.lab.check import check
from oktopk.lab.tasks.registry import TASKS
from oktopk.lab.train.config import specs
from oktopk.lab.train.config_files import load

ENV = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def run(*command: str, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**ENV, **more}, check=False
    )


def test_methods_lists_every_method():
    done = run(sys.executable, "-m", "oktopk", "methods")
    assert done.returncode == 0 and done.stderr == ""
    for name, method in METHODS.items():
        assert f"{name} " in done.stdout and method.words in done.stdout


def test_check_alone(capsys):
    """In this process, as a group of one."""
    assert check(1, 60.0, quick=False, argv=[]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1 rank by oktopk, gloo on cpu") and said.endswith("all is well\n")
    assert said.count("keeps the laws") == len(METHODS)
    assert not dist.is_initialized()


def test_check_says_what_a_launcher_left_out():
    done = run(sys.executable, "-m", "oktopk", "check", OMPI_COMM_WORLD_RANK="1")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "oktopk check: the environment looks like mpirun's, but OMPI_COMM_"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(oktopk, command, capsys):
    assert oktopk(command, "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: oktopk {command} ") and f": oktopk {command}" in said.replace(
        "s:\n  ", ": "
    )
    assert max(map(len, said.splitlines())) <= WIDEST


def test_alone_it_prints_the_commands_in_groups(oktopk, capsys):
    assert oktopk() == 0
    said = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"\n{command.group}:\n" in said and f"  {name} " in said
    assert oktopk("--help") == 0 and capsys.readouterr().out == said
    assert oktopk("data") == 0 and "fix-manifest" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_version(oktopk, capsys, flag):
    assert oktopk(flag) == 0 and capsys.readouterr().out == f"oktopk {__version__}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("trian", "oktopk: COMMAND: there is no 'trian'; did you mean 'train'? (oktopk --help)"),
        ("zzz", "oktopk: COMMAND: there is no 'zzz': it is one of train, compare, sweep, "),
        ("--verion", "oktopk: unrecognized arguments: --verion; did you mean '--version'?"),
        ("train --methd dense", "oktopk train: unrecognized arguments: --methd dense; did you"),
        ("train --method oktok", "oktopk train: --method: there is no 'oktok'; did you mean 'okt"),
        ("train --config qickstart", "oktopk train: no config 'qickstart': give a file that ends"),
        ("train --task txet", "oktopk train: no task 'txet': it is speech, text, images, or a Py"),
        ("train --lr x", "oktopk train: --lr: invalid float value: 'x' (oktopk train --help)"),
        ("train --remedies none", "oktopk train: unrecognized arguments: --remedies none; remed"),
        ("check --workers 0", "oktopk check: --workers: must be from 1 to 1024, got 0 (oktopk ch"),
        ("check --quik", "oktopk check: unrecognized arguments: --quik; did you mean '--quick'?"),
        ("bench --methods oktpk", "oktopk bench: --methods: there is no 'oktpk'; did you mean"),
        ("bench --wire bf17", "oktopk bench: --wire: there is no 'bf17'; did you mean 'bf16'?"),
        ("compare --methods dense,oktok", "oktopk compare: method must be one of dense, topka"),
        ("report", "oktopk report: the following arguments are required: RUN (oktopk report --h"),
        ("report nowhere", "oktopk report: there is no folder nowhere"),
        ("data speek", "oktopk data: ACTION: there is no 'speek'; did you mean 'speak'?"),
        ("data --foo", "oktopk data: unrecognized arguments: --foo (oktopk data --help)"),
        ("completion bsh", "oktopk completion: SHELL: there is no 'bsh'; did you mean 'bash'?"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(oktopk, capsys, words, line):
    assert oktopk(*words.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith(line) and said.err.count("\n") == 1, said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("train --gpus 4", "--workers"),
        ("compare --nproc 4", "--workers"),
        ("check --nproc_per_node=4", "--workers"),
        ("train --steps 9", "--max-steps"),
        ("train --method ddp", "ddp_dense"),
        ("compare --methods ddp,oktopk", "ddp_dense"),
    ],
)
def test_words_of_other_launchers_are_known(oktopk, capsys, words, meant):
    assert oktopk(*words.split()) == 2
    assert f"; did you mean {meant!r}?" in capsys.readouterr().err


def test_help_shows_the_values_that_will_be_used(oktopk, capsys):
    """Those of the config, not the defaults of its class."""
    for words in (("--config", "race"), ("--task", "text"), ("--config", "lstm_full"), ()):
        assert oktopk("train", *words, "--help") == 0
        said = " ".join(capsys.readouterr().out.split())
        given = dict([words] if words else [])
        config = load(given.get("--config", ""), given.get("--task", ""))
        for name in ("workers", "lr", "density", "warmup_steps", "batch"):
            text = specs(config.task)[name].metadata["help"]
            assert f"{text} ({getattr(config, name)})" in said, name
        assert f"task {config.task}:" in said


def test_the_flags_of_a_config_that_is_wrong_are_not_blamed(oktopk, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text('task = "text"\nlr = -1\n')
    for flag in ("--context", "--contxt"):  # a flag of that task, and none
        assert oktopk("train", "--config", "mine.toml", flag, "8") == 2
        assert capsys.readouterr().err.startswith("oktopk train: mine.toml: lr must be ")


def test_every_setting_is_in_a_group():
    for task in TASKS:
        below = innermost(parser(["train", "--task", task]), ["train"])
        ungrouped = {a.dest for a in below._optionals._group_actions}
        assert ungrouped == {"help", "config", "resume"}


@pytest.mark.parametrize("words", [[], ["--help"], ["-V"], ["data", "--help"]])
def test_help_and_version_do_not_import_torch(words):
    """It would take seconds."""
    code = "import sys; from oktopk import cli; sys.argv[1:] = {}\ntry:\n cli.main()\nfinally:\n "
    code += "print({{'torch', 'numba', 'numpy'}} & sys.modules.keys(), file=sys.stderr)"
    done = run(sys.executable, "-c", code.format(words))
    assert done.returncode == 0 and done.stderr == "set()\n", done.stderr


def test_public_names_are_imported_when_they_are_used():
    assert set(oktopk_module._MODULES) == set(oktopk_module.__all__) - {"__version__"}
    assert set(oktopk_module.__all__) <= set(dir(oktopk_module))
    for name in oktopk_module.__all__:
        getattr(oktopk_module, name)
    with pytest.raises(AttributeError, match="module 'oktopk' has no attribute 'atach'"):
        oktopk_module.atach  # noqa: B018


def test_a_method_table_is_drawn_on_a_terminal(oktopk, capsys, monkeypatch):
    assert oktopk("methods") == 0
    plain = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert oktopk("methods") == 0
    assert "─" in capsys.readouterr().out and "─" not in plain


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_flags_and_values(oktopk, capsys, shell):
    assert oktopk("completion", shell) == 0
    script = capsys.readouterr().out
    for word in ("compare", "warmup-steps", "bounds-every", "quickstart", "ddp_powersgd_r1"):
        assert word in script


def test_bash_completes_with_the_script(oktopk, capsys, tmp_path):
    assert oktopk("completion", "bash") == 0
    script = tmp_path / "oktopk.bash"
    script.write_text(capsys.readouterr().out)
    asked = "COMP_WORDS=(oktopk train --dens); COMP_CWORD=2; _shtab_oktopk; echo ${COMPREPLY[@]}"
    done = run("bash", "-c", f"source {script}; {asked}")
    assert done.stdout == "--density\n", done.stderr
