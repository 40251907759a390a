"""SIGINT and SIGTERM end a command with one line and exit code 128 + number, at any moment.

A command that starts processes ends them first. A rank is not a command: what starts it speaks for
it, and SIGTERM must end it even where it waits in C++, so the defaults hold until the trainer takes
over.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)


class InterruptedBySignal(KeyboardInterrupt):
    """Somebody asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {name_of(number)}")
        self.number = number


def name_of(number: int) -> str:
    return signal.Signals(number).name


def is_command() -> bool:
    """Whether this process was started as `oktopk` or `python -m oktopk`, and not as a worker."""
    script = Path(sys.argv[0]).name if sys.argv else ""
    started = script == "oktopk" or sys.orig_argv[1:3] == ["-m", "oktopk"]
    return started and "OKTOPK_RANK" not in os.environ


def leave_at_once() -> None:
    """Until there is something to clean up: while modules are imported, for seconds."""

    def leave(number: int, _: FrameType | None) -> None:
        # not an exception: a module that is being imported may catch any of them
        os.write(2, f"oktopk: interrupted by {name_of(number)}\n".encode())
        os._exit(128 + number)

    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and shells leave it
            signal.signal(number, leave)


@contextmanager
def interruptible(is_rank: bool) -> Iterator[None]:
    """Signals raise InterruptedBySignal in the block, so that it cleans up; a rank has defaults."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise InterruptedBySignal(number)

    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours = {n: h for n in STOPS if (h := signal.getsignal(n)) not in (signal.SIG_IGN, None)}
    for number in ours:
        signal.signal(number, defaults[number] if is_rank else interrupt)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def farewell(error: KeyboardInterrupt) -> int:
    """Say what ended the command; its exit code."""
    number = error.number if isinstance(error, InterruptedBySignal) else signal.SIGINT
    if "OKTOPK_RANK" not in os.environ:
        sys.stderr.write(f"oktopk: interrupted by {name_of(number)}\n")
    return 128 + number
