# SPDX-License-Identifier: Apache-2.0
"""`StateLock`: a state is read whole, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from types import TracebackType


class StateLock:
    """Held while a state changes, and while several parts of it are read together.

    Other threads wait. A thread that changes the state may be interrupted by a signal, whose
    handler runs on that very thread and must not wait: it cannot read the state then.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._num_changes = 0
        self._broken_off = ""

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold it for a change. An error in the block leaves a state that cannot be read again."""
        with self:
            self._num_changes += 1
            try:
                yield
            except BaseException as error:
                self._broken_off = type(error).__name__
                raise
            finally:
                self._num_changes -= 1

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold it to read a state; RuntimeError where a change of it has begun and not ended."""
        with self:
            if self._num_changes:  # of this thread: others would hold the lock
                raise RuntimeError(
                    "the state is being changed by this very thread, as where a signal handler or "
                    "a callback interrupts it: let the handler set a flag, and take the state when "
                    "the step has ended"
                )
            if self._broken_off:
                raise RuntimeError(
                    f"{self._broken_off} came while the state was being changed, so a part of it "
                    "is old and a part new: load the last one that was saved"
                )
            yield
