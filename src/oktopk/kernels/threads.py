# SPDX-License-Identifier: Apache-2.0
"""Threads for kernels on the CPU: every kernel runs on one core, without the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

MIN_VALUES = 2**21  # a thread with fewer values than this is not worth starting


def thread_slices(x: Tensor) -> list[slice]:
    """Cut x into consecutive slices, one for each thread that is worth its start.

    On a CPU there are at most as many as torch has threads. That number may differ between ranks,
    and between threads of one rank, since torch fixes it when a thread first asks for it. So
    nothing that ranks exchange may depend on how many slices there are.
    """
    num = 1
    if x.device.type == "cpu":
        num = max(1, min(torch.get_num_threads(), x.numel() // MIN_VALUES))
    edges = [x.numel() * i // num for i in range(num + 1)]
    return [slice(lo, hi) for lo, hi in pairwise(edges)]


def run_in_threads(work: Callable[[slice], T], slices: list[slice]) -> list[T]:
    """Call `work` with every slice, each in a thread; the results in the order of the slices.

    `work` must not call this function itself. An error, such as KeyboardInterrupt, is raised only
    when all threads are done, since until then they write to the caller's tensors.
    """
    pool = _pool(len(slices), os.getpid())
    futures = [pool.submit(work, part) for part in slices]
    try:
        return [future.result() for future in futures]
    finally:
        wait(futures)


@cache
def _pool(num_threads: int, pid: int) -> ThreadPoolExecutor:
    # By process id: a forked child inherits the pool but not its threads, and would wait forever.
    return ThreadPoolExecutor(num_threads, thread_name_prefix="oktopk-kernel")
