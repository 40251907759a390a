# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM, and a time limit for calls that have none."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, TypeVar

# SIGINT and SIGTERM: everything that handles them does it with the functions here.
#
# A command ends with one line and exit code 128 + number, at any moment. Four things may happen in
# the course of it, and each function sets one of them:
#
# - `exit_on_signals`: the process exits at once, while modules are imported.
# - `raise_on_signals`: InterruptedBySignal is raised, so that a command stops the processes that it
#   started.
# - `record_signals`: they are collected in a list. The launcher passes them on to its workers.
# - `SignalFlag`: the first one is noted, so that the trainer saves a checkpoint; a second one does
#   what it did before.
#
# A rank is not a command: the process that started it prints the line, and SIGTERM must end the
# rank even where it waits in C++. So a rank has the defaults (`default_on_signals`) until the
# trainer makes a `SignalFlag`.


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], Any] | signal.Handlers | int | None
"""What `signal.signal` takes and returns."""


class InterruptedBySignal(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal_name(number)}")
        self.number = number


def signal_name(number: int) -> str:
    """Return `SIGTERM` for 15, and so on."""
    return signal.Signals(number).name


@contextmanager
def signal_handlers(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Install handlers by number, and restore the previous ones after the block."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_on_signals() -> None:
    """Exit at once with one line, without cleaning up: while modules are imported, for seconds."""

    def leave(number: int, _: FrameType | None) -> None:
        # not an exception: a module that is being imported may catch any of them
        os.write(2, f"oktopk: interrupted by {signal_name(number)}\n".encode())
        os._exit(128 + number)

    for number in _not_ignored():
        signal.signal(number, leave)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise InterruptedBySignal in the block when a signal arrives."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise InterruptedBySignal(number)

    with signal_handlers(dict.fromkeys(_not_ignored(), interrupt)):
        yield


@contextmanager
def default_on_signals() -> Iterator[None]:
    """Give SIGINT and SIGTERM Python's defaults in the block."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    with signal_handlers({number: defaults[number] for number in _not_ignored()}):
        yield


@contextmanager
def record_signals() -> Iterator[list[int]]:
    """Collect the numbers of the signals that arrive in the block, in a list."""
    received: list[int] = []

    def record(number: int, _: FrameType | None) -> None:
        received.append(number)

    with signal_handlers(dict.fromkeys(STOP_SIGNALS, record)):
        yield received


class SignalFlag:
    """Notes the first signal that arrives, from its creation until `close`.

    A second signal does what it did before: it ends the process, even one that hangs while it
    saves.
    """

    def __init__(self) -> None:
        self.received = False
        """Whether a signal arrived."""
        self._before = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}

    def close(self) -> None:
        """Restore the previous handlers, once."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, *_: object) -> None:
        self.received = True
        self.close()


def report_interrupt(error: KeyboardInterrupt) -> int:
    """Print which signal ended the command, unless this is a rank; return the exit code."""
    number = error.number if isinstance(error, InterruptedBySignal) else signal.SIGINT
    if "OKTOPK_RANK" not in os.environ:
        sys.stderr.write(f"oktopk: interrupted by {signal_name(number)}\n")
    return 128 + number


def started_as_command() -> bool:
    """Whether this process was started as `oktopk` or `python -m oktopk`, and not as a worker."""
    script = Path(sys.argv[0]).name if sys.argv else ""
    started = script == "oktopk" or sys.orig_argv[1:3] == ["-m", "oktopk"]
    return started and "OKTOPK_RANK" not in os.environ


def _not_ignored() -> list[signal.Signals]:
    """Return the signals that this process does not ignore, as it may under nohup and in shells."""
    return [n for n in STOP_SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)]


# A time limit for calls that have none of their own, such as those of torch's stores.


T = TypeVar("T")
GRACE = 2.0
"""Seconds beyond its own limit that a call gets before `call_with_timeout` abandons it."""


class CallTimeoutError(TimeoutError):
    """A call did not return within its time limit."""


def call_with_timeout(seconds: float, function: Callable[[], T]) -> T:
    """Return or raise what `function` does; CallTimeoutError if it takes more than `seconds`.

    It runs on a daemon thread, which is abandoned when it is late: a call that blocks in C++ cannot
    be interrupted. The calling thread therefore still handles signals while it waits.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised below, on the thread that called
            errors.append(error)

    thread = Thread(target=run, name="oktopk-time-limit", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if results:
        return results[0]
    raise CallTimeoutError(f"no answer after {seconds:g} s")
