"""Where the host meets a device that works on its own time, as a GPU does.

On a CPU nothing of this costs anything. On a GPU every number that the host reads makes it wait for
the device, so numbers are read together; and a wait for the network must have an end, since the
device itself waits for a dead rank without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

SHORTEST, LONGEST = 20e-6, 10e-3  # seconds between two looks at a device


class Work(Protocol):
    """What is needed of `torch.distributed.Work`."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    """Return when `done` says so; TimeoutError after `seconds`.

    It looks again after a tenth of the time that has passed, so the wait is at most a tenth (or
    20 us) longer than it must be, and never more than 10 ms.
    """
    start = time.monotonic()
    while not done():
        passed = time.monotonic() - start
        if passed >= seconds:
            raise TimeoutError(f"not finished on the device after {seconds:g} s")
        time.sleep(min(max(passed / 10, SHORTEST), LONGEST, seconds - passed))


def finish(work: Work, x: Tensor, seconds: float) -> None:
    """Wait for a collective on x, at most so long; RuntimeError or TimeoutError if it fails.

    On a CPU `wait` blocks, and the process group has the time limit. On a GPU `wait` only queues
    the wait on the current stream and returns at once, so it comes last: a stream must not be made
    to wait for what may never come.
    """
    if x.device.type != "cpu":
        wait_until(work.is_completed, seconds)
    work.wait()


def to_device(numbers: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor. From pinned memory, so the host does not wait."""
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)


def to_host(*parts: Tensor) -> list[list[int]]:
    """Integer tensors as lists. However many they are, the host waits once."""
    everything = torch.cat([part.reshape(-1).long() for part in parts]).tolist()
    lists, start = [], 0
    for part in parts:
        lists.append(everything[start : start + part.numel()])
        start += part.numel()
    return lists
