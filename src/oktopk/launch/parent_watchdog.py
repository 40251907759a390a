# SPDX-License-Identifier: Apache-2.0
"""The parent watchdog: a child process ends when the process that started it has ended.

The parent keeps one end of a pipe, and its children watch the other. The pipe closes when the
parent ends, in whatever way: also by a signal that no process can handle.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

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
