# SPDX-License-Identifier: Apache-2.0
"""A child process ends when the process that started it has ended."""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launchers import environment, start, wait_for
from oktopk.lab.train.config import Config
from oktopk.lab.train.run_process import started
from oktopk.launch import child_process
from oktopk.launch.workers import run_local_workers


def launcher_main(folder: Path) -> None:
    os.environ["PYTHONPATH"] = str(folder)
    sys.exit(run_local_workers(2, []))


def comparing_main(folder: Path) -> None:
    os.environ |= {"PYTHONPATH": str(folder), "OKTOPK_RANK": "0", "OKTOPK_SIZE": "1"}
    with started(Config(), "quickstart", folder / "log") as run:
        run.wait()


@pytest.mark.parametrize(("main", "size"), [(launcher_main, 2), (comparing_main, 1)])
def test_children_see_that_their_parent_was_killed(workers, tmp_path, main, size):
    workers(
        "(folder / f'{rank}.ready').touch()\n"
        "os.read(int(os.environ['OKTOPK_PARENT_PIPE']), 1)\n"
        "(folder / f'{rank}.gone').touch()\n"
    )
    parent = start(main, tmp_path)
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.ready"))) == size)
        assert not list(tmp_path.glob("*.gone"))
    finally:
        parent.kill()
        parent.join(10)
    wait_for(lambda: len(list(tmp_path.glob("*.gone"))) == size)


@pytest.mark.parametrize("text", ["", "abc", "-1", "9" * 30, "not open", "a file"])
def test_a_variable_that_names_no_pipe_is_ignored(monkeypatch, tmp_path, text):
    file = os.open(tmp_path / "file", os.O_CREAT)
    closed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1  # earlier tests leave low ones open
    numbers = {"not open": closed, "a file": file}
    monkeypatch.setenv("OKTOPK_PARENT_PIPE", str(numbers.get(text, text)))
    before = threading.active_count()
    child_process.watch_parent()
    assert threading.active_count() == before and "OKTOPK_PARENT_PIPE" not in os.environ
    os.close(file)


def test_every_command_watches_its_parent():
    theirs, ours = os.pipe()
    os.close(ours)
    command = (
        "import time; from oktopk import cli; cli.parse = lambda _: time.sleep(20); cli.main()"
    )
    variables = environment(OKTOPK_PARENT_PIPE=str(theirs))
    done = subprocess.run(
        [sys.executable, "-c", command], env=variables, pass_fds=[theirs], timeout=99, check=False
    )
    os.close(theirs)
    assert done.returncode == -signal.SIGTERM


def worker_main(pipe) -> None:
    os.environ["OKTOPK_PARENT_PIPE"] = str(pipe.fileno())
    child_process.watch_parent()
    time.sleep(60)


def test_a_worker_gets_sigterm_when_its_parent_has_ended():
    theirs, ours = mp.get_context("forkserver").Pipe(duplex=False)
    worker = start(worker_main, theirs)
    theirs.close()
    ours.close()
    worker.join(20)
    assert worker.exitcode == -signal.SIGTERM
    worker.kill()
