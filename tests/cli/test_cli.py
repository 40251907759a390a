"""The commands, as a user types them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from oktopk import METHODS
from oktopk.check import check
from oktopk.cli import parser

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
        "oktopk: LaunchError: the environment looks like mpirun's, but OMPI_COMM_"
    )


@pytest.mark.parametrize("command", ["methods", "check"])
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as left:
        parser([]).parse_args([command, "--help"])
    assert left.value.code == 0 and "example" in capsys.readouterr().out
