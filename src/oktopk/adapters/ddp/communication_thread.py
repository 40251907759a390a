# SPDX-License-Identifier: Apache-2.0
"""The communication thread: takes buckets in order, completes their futures when the step is done.

On CUDA it works on a stream of its own (docs/cuda.md). That stream waits for the event of each
bucket, so it runs behind all that the stream of backward had queued when the bucket was filled; and
the stream of backward waits for it through DDP's futures, which record an event when they get their
result. What one stream made and the other uses is recorded with the allocator.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future as ConcurrentFuture
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from oktopk.adapters.side_stream import drain, share, side_stream
from oktopk.errors import NonfiniteError

T = TypeVar("T")
CLOSED = "the handle of this model was closed: attach it again"


@dataclass(slots=True)
class ReadyBucket:
    """A bucket DDP has filled."""

    index: int
    buffer: Tensor
    parameters: Sequence[Tensor]
    is_last: bool
    ready: torch.cuda.Event | None = None
    """On CUDA: when the gradients are written."""

    at: float = field(default_factory=perf_counter)

    def signature(self) -> tuple[int, ...]:
        """The same for the same parameters in the same order."""
        return tuple(id(parameter) for parameter in self.parameters)


class CommunicationThread:
    """One daemon thread per model. `take` is called with every bucket, in order, while it lives.

    All futures of a step are completed together, after its last bucket: DDP waits for all of them
    anyway, and until then a step can still be rolled back. When `take` raises, the futures carry
    the error, so backward raises it; every later step fails at once with the same error.
    """

    def __init__(self, take: weakref.WeakMethod[Callable[[ReadyBucket], None]]) -> None:
        self._take = take
        self._queue: queue.SimpleQueue[tuple[ReadyBucket | Callable, Any] | None] = (
            queue.SimpleQueue()
        )
        self.failure: Exception | None = None
        """What ended the exchange for good; None while it is well."""

        self._closed = self._begun = False
        self._thread = threading.Thread(target=self._run, name="oktopk-exchange", daemon=True)
        self._thread.start()

    def submit(self, arrived: ReadyBucket) -> torch.futures.Future[Tensor]:
        """Queue a bucket; the future has its averaged gradient. Returns at once."""
        device = arrived.buffer.device
        done: torch.futures.Future[Any] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )
        if self._closed:
            done.set_result(RuntimeError(CLOSED))
        else:
            self._queue.put((arrived, done))
        # an error must be raised inside `then`: DDP waits in C++, where set_exception is not seen
        return done.then(_value_or_raise)

    def call(self, act: Callable[[], T]) -> T:
        """Run `act` on this thread, after what was queued before, and wait for what it returns.

        For collectives outside of a step: all collectives of a rank leave from one thread.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("called from on_step, which must not start collectives")
        if self._closed:
            raise RuntimeError(CLOSED)
        done: ConcurrentFuture[T] = ConcurrentFuture()
        self._queue.put((act, done))
        return done.result()

    def _answer(self, act: Callable[[], T], done: ConcurrentFuture[T]) -> None:
        try:
            if self.failure is not None:
                raise self.failure
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised by `result`, on the caller's thread
            done.set_exception(error)

    def close(self, timeout: float = 5.0) -> None:
        """Let the thread end; a thread stuck in a dead collective is left to the daemon rule."""
        self._closed = True
        self._queue.put(None)
        if threading.current_thread() is not self._thread:  # a callback may close its own handle
            self._thread.join(timeout)

    def _run(self) -> None:
        pending: list[tuple[ReadyBucket, Any]] = []
        while (item := self._queue.get()) is not None:
            arrived, done = item
            if not isinstance(arrived, ReadyBucket):
                self._answer(arrived, done)
                continue
            pending.append((arrived, done))
            try:
                with self._stream(arrived):
                    error = self._attempt(arrived)
                    if arrived.is_last and error is None:
                        while pending:
                            bucket, done = pending.pop(0)
                            done.set_result(bucket.buffer)
                    elif error is not None and arrived.ready is not None:
                        drain(arrived.buffer.device)
            except BaseException as failed:  # noqa: BLE001 - of CUDA: backward must not wait forever
                error = self.failure = _as_exception(failed)
            while pending and error is not None:
                pending.pop(0)[1].set_result(error)
        self._refuse_the_rest()

    def _refuse_the_rest(self) -> None:
        """Answer what was queued behind the end of this thread: somebody may wait for it."""
        while not self._queue.empty():
            if (item := self._queue.get()) is not None:
                asked, done = item
                closed = RuntimeError(CLOSED)
                if isinstance(asked, ReadyBucket):
                    done.set_result(closed)
                else:
                    done.set_exception(closed)

    def _attempt(self, arrived: ReadyBucket) -> Exception | None:
        """Take a bucket; the error to raise in backward, on the user's thread."""
        take = self._take()
        if self.failure is None and take is not None:
            try:
                take(arrived)
            except NonfiniteError as error:  # the step was rolled back: the next may succeed
                return error
            except BaseException as error:  # noqa: BLE001 - sys.exit() too: it would end no process
                self.failure = _as_exception(error)
        return self.failure

    def _stream(self, arrived: ReadyBucket) -> Any:
        if arrived.ready is None:
            return nullcontext()
        device = arrived.buffer.device
        if not self._begun:
            # DDP with a static graph has an operation of its own under way in its first backward
            torch.cuda.synchronize(device)
            self._begun = True
        stream = side_stream(device)
        stream.wait_event(arrived.ready)
        share(arrived.buffer)
        return torch.cuda.stream(stream)


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _value_or_raise(done: torch.futures.Future[Any]) -> Tensor:
    value = done.value()
    if isinstance(value, Exception):
        raise value
    return value
