# SPDX-License-Identifier: Apache-2.0
"""Child processes: what they inherit, and how they are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from oktopk.launch.child_process import parent_pipe, start_child, stop_children
from oktopk.utils.signals import InterruptedBySignal, raise_on_signals

READY = "print('ready', flush=True); "
IGNORES_SIGTERM = "import signal, time; signal.signal(15, signal.SIG_IGN); "
SLEEPS = "import time; "


def started(script: str, pipe: int) -> subprocess.Popen[bytes]:
    """A child that has reached the sleep at the end of its script."""
    command = [sys.executable, "-c", f"{script}{READY}time.sleep(99)"]
    child = start_child(command, pipe, stdout=subprocess.PIPE, stderr=None)
    assert child.stdout is not None
    with child.stdout as stream:
        assert stream.readline() == b"ready\n"
    return child


def test_children_get_sigterm_first_and_those_that_ignore_it_are_killed():
    with parent_pipe() as pipe:
        children = [started(SLEEPS, pipe), started(IGNORES_SIGTERM, pipe)]
        stop_children(children, 0.3)
        assert [child.returncode for child in children] == [-signal.SIGTERM, -signal.SIGKILL]
        stop_children(children, 0.3)  # they have ended already


def test_no_child_is_left_if_a_signal_interrupts_the_wait(monkeypatch):
    """Ctrl-C for the second time: it is not waited for any longer."""
    with parent_pipe() as pipe:
        child = started(IGNORES_SIGTERM, pipe)
        wait, calls = child.wait, []

        def interrupted(timeout: float | None = None) -> int:
            calls.append(timeout)
            if len(calls) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return wait(timeout)

        monkeypatch.setattr(child, "wait", interrupted)
        with pytest.raises(InterruptedBySignal), raise_on_signals():
            stop_children([child], 60)
        assert child.returncode == -signal.SIGKILL and len(calls) == 2


def test_a_child_has_the_variables_a_session_and_the_pipe():
    script = "import os; print(os.environ['A'], os.getsid(0) == os.getpid(), end=' '); "
    script += "os.fstat(int(os.environ['OKTOPK_PARENT_PIPE'])); print('pipe', end='')"
    with parent_pipe() as pipe:
        child = start_child(
            [sys.executable, "-c", script],
            pipe,
            stdout=subprocess.PIPE,
            stderr=None,
            variables={"A": "7"},
        )
        assert child.communicate(timeout=60)[0] == b"7 True pipe"
