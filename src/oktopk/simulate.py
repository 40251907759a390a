"""P ranks in one process: threads in lockstep, for scales no test machine has.

The methods are the same code as over a network; only the transport differs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from oktopk.comm import Comm

T = TypeVar("T")


class Hub:
    """Where the simulated ranks meet: everyone lays down its messages, everyone takes its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[list[Tensor]] = [[] for _ in range(size)]
        self.barrier = threading.Barrier(size)


class SimulatedTransport:
    """One simulated rank."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.size = hub.size

    def exchange(self, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
        self.hub.slots[self.rank] = outgoing
        self.hub.barrier.wait()
        for peer, messages in enumerate(self.hub.slots):
            if peer != self.rank and incoming[peer].numel():
                incoming[peer].copy_(messages[self.rank])
        self.hub.barrier.wait()  # nobody may reuse a buffer before all have read it

    def all_reduce_(self, x: Tensor) -> None:
        """Each rank sums its share in rank order, then all copy the shares."""
        share = -(-x.numel() // self.size) or 1
        mine = slice(self.rank * share, (self.rank + 1) * share)
        self.hub.slots[self.rank] = [x]
        self.hub.barrier.wait()
        total = torch.zeros_like(x[mine])
        for (theirs,) in self.hub.slots:
            total += theirs[mine]
        self.hub.barrier.wait()
        self.hub.slots[self.rank] = [total]
        self.hub.barrier.wait()
        torch.cat([part for (part,) in self.hub.slots], out=x)
        self.hub.barrier.wait()


def alone() -> Comm:
    """A `Comm` of one rank, for training without a process group."""
    return Comm(SimulatedTransport(Hub(1), 0))


def simulate(size: int, rank_main: Callable[[Comm], T]) -> list[T]:
    """Run `rank_main(comm)` on `size` simulated ranks; return what each returned, by rank.

    The first error of any rank ends all of them and is raised here.
    """
    hub = Hub(size)
    errors: list[BaseException] = []

    def run(rank: int) -> T:
        try:
            torch.set_num_threads(1)  # one pool of threads per rank would be size times too many
            return rank_main(Comm(SimulatedTransport(hub, rank)))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            hub.barrier.abort()
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="simulated-rank") as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
