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

from oktopk.comm.communicator import Comm

T = TypeVar("T")


class AbandonedError(RuntimeError):
    """Another simulated rank failed; its error is the one to read."""


class Hub:
    """Where the simulated ranks meet.

    One rank runs at a time: it lays down its messages and hands the turn to the next. When the turn
    comes back, everybody has been here. Hundreds of threads that all wake at a barrier would fight
    for the interpreter instead.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[dict[int, Tensor]] = [{} for _ in range(size)]
        self.board = torch.empty(0)
        self.failed = False
        self._left = [False] * size
        self._meetings = [0] * size
        self._turns = [threading.Semaphore(0) for _ in range(size)]

    def start(self) -> None:
        self._turns[0].release()

    def wait_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        if self.failed:
            raise AbandonedError

    def meet(self, rank: int) -> None:
        """Return when every rank has called it as often as this one."""
        self._meetings[rank] += 1
        self._pass_on(rank)
        self.wait_turn(rank)
        mine = self._meetings[rank]
        if any(left and seen < mine for left, seen in zip(self._left, self._meetings, strict=True)):
            raise RuntimeError(f"rank {rank} waits in a collective that other ranks never enter")

    def leave(self, rank: int) -> None:
        self._left[rank] = True
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        for distance in range(1, self.size + 1):
            following = (rank + distance) % self.size
            if not self._left[following]:
                self._turns[following].release()
                return


class SimulatedTransport:
    """One simulated rank."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.size = hub.size

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        self._lay_down(outgoing)
        for peer, message in incoming.items():
            message.copy_(self.hub.slots[peer][self.rank])
        self.hub.meet(self.rank)  # nobody may reuse a buffer before all have read it

    def swap(self, x: Tensor, out: Tensor) -> None:
        self._lay_down({0: x})
        if self.rank == 0:  # all rows at once: copies one by one would be P squared
            self.hub.board = torch.stack([slot[0] for slot in self.hub.slots])
        self.hub.meet(self.rank)
        out.copy_(self.hub.board[:, self.rank])

    def close(self) -> None:
        pass

    def _lay_down(self, messages: dict[int, Tensor]) -> None:
        self.hub.slots[self.rank] = messages
        self.hub.meet(self.rank)

    def all_reduce_(self, x: Tensor) -> None:
        """Each rank sums its share in rank order, then all copy the shares."""
        share = -(-x.numel() // self.size) or 1
        mine = slice(self.rank * share, (self.rank + 1) * share)
        self._lay_down({0: x})
        total = torch.zeros_like(x[mine])
        for slot in self.hub.slots:
            total += slot[0][mine]
        self.hub.meet(self.rank)
        self._lay_down({0: total})
        torch.cat([slot[0] for slot in self.hub.slots], out=x)
        self.hub.meet(self.rank)


def alone() -> Comm:
    """A `Comm` of one rank, for training without a process group."""
    return Comm(SimulatedTransport(Hub(1), 0))


def simulate(
    size: int,
    rank_main: Callable[[Comm], T],
    *,
    transport: type[SimulatedTransport] = SimulatedTransport,
) -> list[T]:
    """Run `rank_main(comm)` on `size` simulated ranks; return what each returned, by rank.

    The first error of any rank ends all of them and is raised here.
    """
    if size < 1:
        raise ValueError(f"there must be 1 rank or more, got {size}")
    hub, num_threads = Hub(size), torch.get_num_threads()
    errors: list[BaseException] = []

    def run(rank: int) -> T | None:
        torch.set_num_threads(1)  # one pool of threads per rank would be size times too many
        try:
            hub.wait_turn(rank)
            return rank_main(Comm(transport(hub, rank)))
        except AbandonedError:
            return None
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            errors.append(error)
            hub.failed = True
            return None
        finally:
            hub.leave(rank)

    with ThreadPoolExecutor(size, thread_name_prefix="simulated-rank") as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        hub.start()
    torch.set_num_threads(num_threads)  # new threads of the caller would inherit the 1
    if errors:
        raise errors[0]
    return [future.result() for future in futures]  # type: ignore[misc]
