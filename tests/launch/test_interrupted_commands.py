# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM end a command at any moment with one line and 128 + their number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from launchers import environment
from oktopk.lab import check
from oktopk.launch import workers as local_workers
from oktopk.launch.workers import run_local_workers

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])


@BOTH
@pytest.mark.parametrize("start", [["-m", "oktopk"], ["bin/oktopk"]], ids=["module", "script"])
def test_while_modules_are_imported(tmp_path, number, start):
    """What is found first as torch sends the signal, and catches whatever that raises."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os, time\n"
        f"try: os.kill(os.getpid(), {int(number)}); time.sleep(20)\n"
        "except BaseException: pass\n"
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "oktopk").write_text("from oktopk.cli import main; main()\n")
    known = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, *start, "check"],
        env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{known}"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == f"oktopk: interrupted by {signal.Signals(number).name}\n"
    assert done.returncode == 128 + number


@BOTH
def test_before_workers_are_started(oktopk, monkeypatch, capfd, number):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(check, "run_local_workers", lambda *_: os.kill(os.getpid(), number))
    assert oktopk("check") == 128 + number
    assert capfd.readouterr().err == f"oktopk: interrupted by {signal.Signals(number).name}\n"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@BOTH
def test_before_the_first_worker_has_started(workers, monkeypatch, capfd, number):
    workers("raise SystemExit('it was started')")
    parent_pipe = local_workers.parent_pipe

    @contextmanager
    def signalled():
        with parent_pipe() as pipe:
            os.kill(os.getpid(), number)
            yield pipe

    monkeypatch.setattr(local_workers, "parent_pipe", signalled)
    assert run_local_workers(2, []) == 128 + number
    name = signal.Signals(number).name
    assert capfd.readouterr().err == (
        f"oktopk: interrupted by {name} before a worker had started\n"
    )


@BOTH
def test_between_the_first_worker_and_the_second(workers, tmp_path, capfd, number):
    """The first may be anywhere between its birth and its first line."""
    workers("(folder / f'{rank}.ready').touch(); time.sleep(60)")
    sent = []

    def prefix(rank: int) -> list[str]:
        if rank == 1 and not sent:
            sent.append(os.kill(os.getpid(), number))
        return []

    assert run_local_workers(3, [], prefix=prefix) == 128 + number
    name = signal.Signals(number).name
    assert capfd.readouterr().err == (
        f"oktopk: interrupted by {name}; the workers were asked to save and leave\n"
    )
    assert not (tmp_path / "2.ready").exists()
