# SPDX-License-Identifier: Apache-2.0
"""`Moments`: when a state of local steps may be taken.

The weights are written in place, by the optimizer and by the exchange, so in between a state would
be half old and half new. It can be taken between steps, not inside of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INSIDE = (
    "the state of local_steps was asked for inside optimizer.step() or exchange(), where weights "
    "and counters are half old and half new: let the signal handler set a flag, and take the state "
    "between two steps"
)
LOOK_SECONDS = 0.02


class Moments:
    """Whether a thread is inside of a step. Others wait for its end to take a state, and it waits
    until they have taken it."""

    def __init__(self, is_stepping: Callable[[int], bool]) -> None:
        self._is_stepping = is_stepping
        """Whether a thread is inside the optimizer's step: nobody is told of the end of one that
        raised."""

        self._condition = threading.Condition()
        self._step: int | None = None
        """The thread that began a step last; None when it has ended."""

        self._block: int | None = None
        """The thread that is inside of a block of `changing`."""

    def begin_step(self) -> None:
        """A step of the optimizer begins on this thread."""
        with self._condition:
            self._step = threading.get_ident()

    def end_step(self) -> None:
        """The step has ended, and all that it did to the state."""
        with self._condition:
            self._step = None
            self._condition.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The block changes the state outside of a step."""
        with self._condition:
            before, self._block = self._block, threading.get_ident()
        try:
            yield
        finally:
            with self._condition:
                self._block = before
                self._condition.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The block takes a state. RuntimeError inside of a step of this very thread."""
        with self._condition:
            while (thread := self._inside()) is not None:
                if thread == threading.get_ident():
                    raise RuntimeError(INSIDE)
                self._condition.wait(LOOK_SECONDS)
            yield

    def _inside(self) -> int | None:
        if self._block is None and self._step is not None and self._is_stepping(self._step):
            return self._step
        return self._block
