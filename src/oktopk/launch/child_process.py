# SPDX-License-Identifier: Apache-2.0
"""Child processes: starting and stopping them, and a watchdog in each for its parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import IO

# The parent watchdog: a child process ends when the process that started it has ended.
#
# The parent keeps one end of a pipe, and its children watch the other. The pipe closes when the
# parent ends, in whatever way: also by a signal that no process can handle.


PIPE_VARIABLE = "OKTOPK_PARENT_PIPE"
"""The environment variable that tells a child the file descriptor of its end of the pipe."""
ORPHAN_SECONDS = 30.0
"""Time that a process has to save and exit after its parent has ended."""


@contextmanager
def parent_pipe() -> Iterator[int]:
    """Open the pipe and return the end for children: in their `pass_fds` and in PIPE_VARIABLE."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


def watch_parent() -> None:
    """If the parent gave this process a pipe, send it SIGTERM when the parent has ended.

    After ORPHAN_SECONDS more the process exits. A variable that does not name an open pipe was set
    by somebody else and is ignored. The variable is removed, so that processes which this one
    starts in turn do not inherit it.
    """
    text = os.environ.pop(PIPE_VARIABLE, "")
    if not text.isdecimal():
        return
    try:
        pipe = int(text)
        is_pipe = stat.S_ISFIFO(os.fstat(pipe).st_mode)
    except (OSError, OverflowError, ValueError):  # not open, or too large a number
        return
    if is_pipe:
        os.set_inheritable(pipe, False)
        Thread(target=_end_with_parent, args=[pipe], daemon=True).start()


def _end_with_parent(pipe: int) -> None:
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


# Starting and stopping child processes: local workers, and the runs of `compare` and `sweep`.


Output = IO[bytes] | int | None
"""Where a stream of a child goes: a file, `subprocess.PIPE`, or None for the stream of this one."""


def start_child(
    command: Sequence[str],
    pipe: int,
    *,
    stdout: Output,
    stderr: Output,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that ends when this one has ended, by the pipe of `parent_pipe`.

    `variables` are added to its environment. It has a session of its own: Ctrl-C in a terminal
    reaches only this process, which decides what its children get.
    """
    return subprocess.Popen(
        command,
        env={**os.environ, **(variables or {}), PIPE_VARIABLE: str(pipe)},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=[pipe],
        start_new_session=True,
    )


def stop_children(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Send SIGTERM to children that still run, and kill those that run after `seconds` more.

    Children of a child end with it, by their own parent watchdog.
    """
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.terminate()
    deadline = time.monotonic() + seconds
    try:
        for child in running:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0, deadline - time.monotonic()))
    finally:  # also if another Ctrl-C interrupts the wait
        for child in running:
            if child.poll() is None:
                child.kill()
                child.wait()
