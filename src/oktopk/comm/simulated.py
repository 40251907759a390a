# SPDX-License-Identifier: Apache-2.0
"""P ranks as threads of one process, in lockstep, for more ranks than a test machine has.

The methods run the same code as over a network; only the transport differs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from oktopk.comm.communicator import Comm

T = TypeVar("T")


class AbandonedError(RuntimeError):
    """Another simulated rank failed. That rank's error is the one to read."""


class Scheduler:
    """Lets one simulated rank run at a time, in turn.

    A rank runs until it must wait for others, then passes the turn to the next rank. Hundreds of
    threads that all wake at a barrier would compete for the interpreter instead.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.failed = False
        self.num_events = 0
        """Collectives that ranks have entered, and ranks that have ended: progress of any kind."""
        self._ended = [False] * size
        self._turns = [threading.Semaphore(0) for _ in range(size)]

    def start(self) -> None:
        """Give the first turn to rank 0."""
        self._turns[0].release()

    def wait_turn(self, rank: int) -> None:
        """Block until it is this rank's turn; AbandonedError if another rank failed meanwhile."""
        self._turns[rank].acquire()
        if self.failed:
            raise AbandonedError

    def pass_turn(self, rank: int) -> None:
        """Let the next rank run that has not ended; it may be this one."""
        for distance in range(1, self.size + 1):
            following = (rank + distance) % self.size
            if not self._ended[following]:
                self._turns[following].release()
                return

    def end(self, rank: int) -> None:
        """Take a rank out of the turns: its function has returned or raised."""
        self._ended[rank] = True
        self.num_events += 1
        self.pass_turn(rank)


class SimulatedGroup:
    """Ranks that call collectives together, and the memory through which they exchange messages."""

    def __init__(self, scheduler: Scheduler, ranks: list[int]) -> None:
        self.scheduler = scheduler
        self.ranks = ranks
        """The numbers of the group's ranks among all simulated ranks."""
        self.slots: list[dict[int, Tensor]] = [{} for _ in ranks]
        self.rows = torch.empty(0)
        self._num_barriers = [0] * len(ranks)
        self._subgroups: dict[tuple[int, tuple[int, ...]], SimulatedGroup] = {}
        self._num_splits = [0] * len(ranks)

    def barrier(self, rank: int) -> None:
        """Return when every rank of the group has called it as often as this one.

        Raises RuntimeError when it never will: all other ranks wait too, or have ended.
        """
        scheduler, mine = self.scheduler, self.ranks[rank]
        self._num_barriers[rank] += 1
        scheduler.num_events += 1
        count, before = self._num_barriers[rank], -1
        while before < 0 or min(self._num_barriers) < count:
            if before == scheduler.num_events:  # every other rank has had a turn and did nothing
                raise RuntimeError(
                    f"rank {mine} waits in a collective that other ranks never enter"
                )
            before = scheduler.num_events
            scheduler.pass_turn(mine)
            scheduler.wait_turn(mine)

    def subgroup(self, rank: int, ranks: list[int]) -> SimulatedGroup:
        """Return one group for all `ranks` that call this for the same time."""
        self._num_splits[rank] += 1
        key = (self._num_splits[rank], tuple(ranks))
        global_ranks = [self.ranks[each] for each in ranks]
        return self._subgroups.setdefault(key, SimulatedGroup(self.scheduler, global_ranks))


class SimulatedTransport:
    """The transport of one simulated rank."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = len(group.ranks)
        self.global_ranks = group.ranks

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        self._publish(outgoing)
        for peer, message in incoming.items():
            message.copy_(self.group.slots[peer][self.rank])
        self.group.barrier(self.rank)  # nobody may reuse a buffer before all have read it

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        self._publish({0: x})
        if self.rank == 0:  # all rows at once: copies one by one would be P squared
            self.group.rows = torch.stack([slot[0] for slot in self.group.slots])
        self.group.barrier(self.rank)
        out.copy_(self.group.rows[:, self.rank])

    def all_reduce_(self, x: Tensor) -> None:
        """Each rank sums its share in rank order, then all copy the shares."""
        share = -(-x.numel() // self.size) or 1
        mine = slice(self.rank * share, (self.rank + 1) * share)
        self._publish({0: x})
        total = torch.zeros_like(x[mine])
        for slot in self.group.slots:
            total += slot[0][mine]
        self.group.barrier(self.rank)
        self._publish({0: total})
        torch.cat([slot[0] for slot in self.group.slots], out=x)
        self.group.barrier(self.rank)

    def split(self, groups: list[list[int]]) -> SimulatedTransport:
        ranks = next(group for group in groups if self.rank in group)
        return type(self)(self.group.subgroup(self.rank, ranks), ranks.index(self.rank))

    def close(self) -> None:
        pass

    def _publish(self, messages: dict[int, Tensor]) -> None:
        """Show this rank's messages to the group; return when all ranks have shown theirs."""
        self.group.slots[self.rank] = messages
        self.group.barrier(self.rank)


def single_rank_comm() -> Comm:
    """Return a `Comm` of one rank, for training without a process group."""
    return Comm(SimulatedTransport(SimulatedGroup(Scheduler(1), [0]), 0))


def simulate(
    size: int,
    rank_main: Callable[[Comm], T],
    *,
    transport: type[SimulatedTransport] = SimulatedTransport,
) -> list[T]:
    """Run `rank_main(comm)` on `size` simulated ranks; return what each returned, by rank.

    The ranks are threads of this process that take turns. They run the same code as over a network;
    only the transport differs. Hundreds of them are possible.

    Args:
        size: the number of ranks.
        rank_main: called once for each rank with its `Comm`, which has `rank` and `size`. Pass the
            `Comm` on to `oktopk.Reducer(..., comm=comm)` or `oktopk.local_steps(..., comm=comm)`.
        transport: the transport of the ranks; a subclass can count or delay messages.

    Returns:
        What `rank_main` returned, in rank order.

    Raises:
        ValueError: `size` is less than 1.
        RuntimeError: a rank waits in a collective that other ranks never enter.
        Exception: the first error of any rank. It ends all of them and is raised here.
    """
    if size < 1:
        raise ValueError(f"there must be 1 rank or more, got {size}")
    num_threads = torch.get_num_threads()

    def on_one_thread(comm: Comm) -> T:
        torch.set_num_threads(1)  # one pool of threads per rank would be size times too many
        return rank_main(comm)

    try:
        return run_ranks(size, on_one_thread, transport)
    finally:
        torch.set_num_threads(num_threads)  # new threads of the caller would inherit the 1


def run_ranks(
    size: int,
    rank_main: Callable[[Comm], T],
    transport: type[SimulatedTransport] = SimulatedTransport,
) -> list[T]:
    """`simulate` with the number of torch threads as it is: other threads may be training."""
    scheduler = Scheduler(size)
    group = SimulatedGroup(scheduler, list(range(size)))
    errors: list[BaseException] = []
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        try:
            scheduler.wait_turn(rank)
            results[rank] = rank_main(Comm(transport(group, rank)))
        except AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            errors.append(error)
            scheduler.failed = True
        finally:
            scheduler.end(rank)

    # no ThreadPoolExecutor: it takes no work once the program has begun to end, and kernels may
    # still be compiled then
    ranks = [
        threading.Thread(target=run, args=(rank,), name=f"simulated-rank-{rank}")
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    try:
        scheduler.start()
    finally:
        for rank in ranks:
            rank.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
