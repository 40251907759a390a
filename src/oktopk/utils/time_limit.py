"""A time limit for calls that have none of their own, such as those of torch's stores."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
GRACE = 2.0
"""Seconds after which a call that should have given up by itself is left behind."""


class Overdue(TimeoutError):  # noqa: N818 - the caller turns it into an error with a name
    """A bounded call did not return in time."""


def within(seconds: float, act: Callable[[], T]) -> T:
    """What `act` returns or raises; `Overdue` when it has done neither after so many seconds.

    It runs on a daemon thread, which is left behind when it is late: a call that blocks in C++
    cannot be interrupted. So signals are handled while this waits, too.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:  # noqa: BLE001 - raised below, on the thread that called
            errors.append(error)

    thread = Thread(target=run, name="oktopk-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if results:
        return results[0]
    raise Overdue(f"no answer after {seconds:g} s")
