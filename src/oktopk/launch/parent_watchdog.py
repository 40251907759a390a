"""A pipe between a process and those it starts, so that none is left behind.

It closes when the starter is gone, however that ended: also by a signal nobody can catch.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

LINE = "OKTOPK_LINE"
ORPHAN_SECONDS = 30.0
"""What a process has to save and leave when its starter is gone."""


@contextmanager
def lifeline() -> Iterator[int]:
    """The end of the pipe for those that are started: in their `pass_fds`, and as LINE."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


def hold() -> None:
    """End with the starter, if it gave this process a line: by SIGTERM first.

    What others left in the environment is not a line, and what this process starts has none.
    """
    told = os.environ.pop(LINE, "")
    if not told.isdecimal():
        return
    try:
        line = int(told)
        is_pipe = stat.S_ISFIFO(os.fstat(line).st_mode)
    except (OSError, OverflowError, ValueError):  # not open, or too large a number
        return
    if is_pipe:
        os.set_inheritable(line, False)
        Thread(target=_end_with_starter, args=[line], daemon=True).start()


def _end_with_starter(line: int) -> None:
    os.read(line, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)
