# SPDX-License-Identifier: Apache-2.0
"""A time limit for calls that have none of their own, such as those of torch's stores."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

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
