"""The commands, as a user types them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from oktopk import METHODS

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


@pytest.mark.parametrize("workers", ["3"])
def test_check_starts_its_own_workers(workers):
    done = run(sys.executable, "-m", "oktopk", "check", "--workers", workers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all is well\n") and done.stderr == ""
    assert f"{workers} ranks by oktopk, gloo on cpu" in done.stdout
    assert done.stdout.count("keeps the laws") == len(METHODS)


def test_check_under_torchrun():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = run(*launcher, "--nproc-per-node", "2", "-m", "oktopk", "check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks by torchrun" in done.stdout and "all is well" in done.stdout


def test_check_says_what_a_launcher_left_out():
    done = run(sys.executable, "-m", "oktopk", "check", SLURM_PROCID="1", SLURM_NTASKS="4")
    assert done.returncode != 0
    assert "rank 1 of 4, started by srun: set MASTER_ADDR and MASTER_PORT" in done.stderr


@pytest.mark.parametrize("command", ["methods", "check"])
def test_every_command_has_help_with_an_example(command):
    done = run(sys.executable, "-m", "oktopk", command, "--help")
    assert done.returncode == 0 and "example" in done.stdout
