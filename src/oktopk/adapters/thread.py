# SPDX-License-Identifier: Apache-2.0
"""Threads and streams: exchanges beside the backward pass, and beside the optimizer."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import Future as ConcurrentFuture
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from oktopk.errors import NonfiniteError
from oktopk.utils.device import wait_until

# The stream of the exchange on CUDA, one per device, and what it shares with other streams.


log = logging.getLogger("oktopk")

DRAIN_SECONDS = 5.0

_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the exchange on a device; there is one."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


@contextmanager
def reading(x: Tensor | None) -> Iterator[None]:
    """Read x on the current stream; the stream of the exchange does not change it meanwhile."""
    if x is None or not x.is_cuda:
        yield
        return
    here, side = torch.cuda.current_stream(x.device), side_stream(x.device)
    here.wait_stream(side)
    x.record_stream(here)
    yield
    side.wait_stream(here)


def share(x: Tensor) -> None:
    """Tell the allocator that the stream of the exchange uses x, which another stream has made."""
    if x.is_cuda:
        x.record_stream(side_stream(x.device))


def drain(device: torch.device) -> None:
    """Wait for the stream of the exchange: unlike a result, an error has no event to wait for.

    Else backward would raise, and the user change gradients and residuals that are still written.
    """
    done = torch.cuda.Event()
    done.record(side_stream(device))
    try:
        wait_until(done.query, DRAIN_SECONDS)
    except TimeoutError as late:
        log.warning("an exchange failed and its stream is still busy (%s)", late)


# The communication thread: takes buckets in order, completes their futures when the step is done.
#
# On CUDA it works on a stream of its own (docs/cuda.md). That stream waits for the event of each
# bucket, so it runs behind all that the stream of backward had queued when the bucket was filled;
# and the stream of backward waits for it through DDP's futures, which record an event when they
# get their result. What one stream made and the other uses is recorded with the allocator.


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


# The thread on which exchanges run while the optimizer goes on (`delay` of `local_steps`).
#
# There is one per handle, and it runs exchanges in the order in which they were launched: so all
# collectives leave in the same order on every rank. On CUDA it works on the side stream, which
# waits for an event of the launch; whoever asks for the result waits for an event of the side
# stream.


CLOSE_SECONDS = 5.0


class Job(Generic[T]):
    """Something that runs in the background, or has run."""

    def __init__(self) -> None:
        self.future: Future[T] = Future()
        self.device: torch.device | None = None
        self.event: torch.cuda.Event | None = None
        """On CUDA: when the side stream has done it."""

    def error(self) -> BaseException | None:
        """Wait for it: the error that it raised, or None."""
        return self.future.exception()

    def result(self) -> T:
        """Wait for it: what it returned, or the error that it raised."""
        value = self.future.result()
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)
        return value


def finished(value: T) -> Job[T]:
    """A job that has run already and returned `value`."""
    job: Job[T] = Job()
    job.future.set_result(value)
    return job


class BackgroundThread:
    """One daemon thread: a rank that is stuck in a dead collective must not keep a process alive.

    It has as many torch threads as any new thread; no result depends on how many.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="oktopk-rounds", daemon=True)
        self._thread.start()

    def submit(self, act: Callable[[], T], like: Tensor) -> Job[T]:
        """Queue `act`, which works on the device of `like`. Returns at once.

        `like` was made on the current stream, and so was all that `act` reads.
        """
        job: Job[T] = Job()
        if like.is_cuda:
            share(like)
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(like.device))
            act = partial(_on_side_stream, job, act, like.device, ready)
        self._queue.put(partial(_answer, job, act))
        return job

    def close(self) -> bool:
        """Let the thread end when it has run what was queued; wait for it at most 5 s. Returns
        whether it has."""
        self._queue.put(None)
        if threading.current_thread() is self._thread:  # it may hold the last reference
            return True
        self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (answer := self._queue.get()) is not None:
            answer()
            del answer  # it holds the handle, which may be dropped now


def _answer(job: Job[T], act: Callable[[], T]) -> None:
    try:
        job.future.set_result(act())
    except BaseException as error:  # noqa: BLE001 - raised by `result`, on the caller's thread
        job.future.set_exception(error)


def _on_side_stream(
    job: Job[T], act: Callable[[], T], device: torch.device, ready: torch.cuda.Event
) -> T:
    side = side_stream(device)
    side.wait_event(ready)
    with torch.cuda.device(device), torch.cuda.stream(side):
        try:
            value = act()
        except BaseException:
            drain(device)  # an error has no event, and the caller may change what is still written
            raise
        job.device, job.event = device, torch.cuda.Event()
        job.event.record(side)
    return value
