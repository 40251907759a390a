# SPDX-License-Identifier: Apache-2.0
"""The thread on which exchanges run while the optimizer goes on (`delay` of `local_steps`).

There is one per handle, and it runs exchanges in the order in which they were launched: so all
collectives leave in the same order on every rank. On CUDA it works on the side stream, which waits
for an event of the launch; whoever asks for the result waits for an event of the side stream.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from oktopk.adapters.side_stream import drain, share, side_stream

T = TypeVar("T")
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
