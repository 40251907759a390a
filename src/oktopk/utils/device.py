# SPDX-License-Identifier: Apache-2.0
"""Transfers between the host and a device that works asynchronously, as a GPU does.

On a CPU none of this costs anything. On a GPU the host waits for the device whenever it reads a
number, so several numbers are read together. A wait for a collective needs a time limit on the
host, since the device would wait for a dead rank without end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

MIN_POLL, MAX_POLL = 20e-6, 10e-3  # seconds between two looks at a device


class Work(Protocol):
    """The methods of `torch.distributed.Work` that are called here."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    """Poll until `done` returns True; raise TimeoutError after `seconds`.

    It polls again after a tenth of the time that has passed, but after 20 us at least and 10 ms at
    most. So it returns at most that much too late.
    """
    start = time.monotonic()
    while not done():
        passed = time.monotonic() - start
        if passed >= seconds:
            raise TimeoutError(f"not finished on the device after {seconds:g} s")
        time.sleep(min(max(passed / 10, MIN_POLL), MAX_POLL, seconds - passed))


def finish(work: Work, x: Tensor, seconds: float) -> None:
    """Wait for a collective on x; raise RuntimeError or TimeoutError if it fails.

    On a CPU `wait` blocks, and the process group has the time limit. On a GPU `wait` only queues
    the wait on the current stream and returns at once. It is called last there: a stream must not
    be made to wait for something that may never complete.
    """
    if x.device.type != "cpu":
        wait_until(work.is_completed, seconds)
    work.wait()


def to_device(numbers: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a tensor on the device. From pinned memory, so the host does not wait."""
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)


def to_host(*parts: Tensor) -> list[list[int]]:
    """Copy integer tensors to lists. The host waits once, however many tensors there are."""
    everything = torch.cat([part.reshape(-1).long() for part in parts]).tolist()
    lists, start = [], 0
    for part in parts:
        lists.append(everything[start : start + part.numel()])
        start += part.numel()
    return lists
