# SPDX-License-Identifier: Apache-2.0
"""The transport over a torch process group: the only module that calls torch's collectives."""

from __future__ import annotations

from datetime import timedelta
from threading import Thread
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from oktopk.comm.store import Store
from oktopk.errors import ExchangeError
from oktopk.utils.device import finish

TIMEOUT = 300.0  # seconds; less than NCCL's own limit of 600, which ends the process
CLOSE_SECONDS = 5.0

Move = Literal["send", "recv"]
"""What is done with a tensor; the names of a process group's methods."""


def nccl_timeout(seconds: float) -> timedelta:
    """Return the limit to give to a NCCL group whose operations may take `seconds`.

    NCCL ends the process at its limit, so that one must be later than the one of `TorchTransport`.
    """
    return timedelta(seconds=2 * seconds)


class TorchTransport:
    """A torch process group as a transport; `None` is the default group.

    On a GPU, `timeout` seconds are the limit of each operation: the host would otherwise wait for
    a dead rank without end. On a CPU the process group has the limit. `close` destroys the process
    group only if it is `owned`.
    """

    def __init__(self, group: Any = None, *, owned: bool = False, timeout: float = TIMEOUT) -> None:
        self.group: Any = group
        self._owned = owned
        self._timeout = timeout
        self._on_device = self._failed = False
        self._subgroups: list[TorchTransport] = []
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} of the job is not in the group it was given")
        self.size = dist.get_world_size(group)
        self.global_ranks = dist.get_process_group_ranks(group)

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        moves: list[tuple[Move, Tensor, int]] = []
        for distance in range(1, self.size):  # rotated: no two ranks aim at the same peer at once
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if source in incoming:
                moves.append(("recv", incoming[source], source))
            if target in outgoing:
                moves.append(("send", outgoing[target], target))
        if moves:
            self._wait(moves)

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        out[self.rank].copy_(x[self.rank])
        peers = [peer for peer in range(self.size) if peer != self.rank] if x[0].numel() else []
        self.exchange({peer: x[peer] for peer in peers}, {peer: out[peer] for peer in peers})

    def all_reduce_(self, x: Tensor) -> None:
        failure = "the dense allreduce failed"
        try:
            work = dist.all_reduce(x, group=self.group, async_op=True)
        except RuntimeError as error:
            raise ExchangeError(f"{failure}: {error}") from error
        self._finish(work, x, failure)

    def split(self, groups: list[list[int]]) -> TorchTransport:
        """Return the transport of a new process group.

        torch gives a new group its name by counting. If this transport has all ranks of the job,
        each rank therefore takes part in making every group. If not, a rank makes its own group
        only, and its ranks must have made equally many groups before.
        """
        whole_job = self.size == dist.get_world_size()
        backend = dist.get_backend(self.group)
        on_cuda = backend == "nccl"
        limit = nccl_timeout(self._timeout) if on_cuda else timedelta(seconds=self._timeout)
        for ranks in groups:
            if not whole_job and self.rank not in ranks:
                continue
            group = dist.new_group(
                [self.global_ranks[rank] for rank in ranks],
                timeout=limit,
                backend=backend,
                use_local_synchronization=not whole_job,
            )
            if self.rank in ranks:
                self._subgroups.append(TorchTransport(group, owned=True, timeout=self._timeout))
        return self._subgroups[-1]

    def store(self) -> Store:
        """Return the store of the group, over a connection of its own where torch can make one."""
        store: Any = dist.distributed_c10d._get_process_group_store(self.group)
        return store.clone() if hasattr(store, "clone") else store

    def close(self) -> None:
        """Destroy the group if it is owned. Connections close with the last reference to it."""
        for subgroup in self._subgroups:
            subgroup.close()
        if not self._owned:
            return
        self._owned = False
        group, self.group = self.group, dist.GroupMember.NON_GROUP_MEMBER
        if not self._on_device:
            if group in dist.distributed_c10d._world.pg_map:  # else the script has destroyed it
                dist.destroy_process_group(group)
            return
        # NCCL finishes its pending operations before it destroys a group: it waits for dead ranks
        abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
        end = abort if self._failed else dist.destroy_process_group
        closing = Thread(target=end, args=(group,), name="oktopk-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _begin(self, moves: list[tuple[Move, Tensor, int]]) -> list[Any]:
        """Post all of them at once.

        On CPUs by the group's own methods: torch's functions look it up among all groups first, and
        a script that ends destroys them while its last exchange is in flight. The other ranks wait
        for the rest of that one.
        """
        if moves[0][1].device.type == "cpu":
            group = dist.group.WORLD if self.group is None else self.group
            if group in (None, dist.GroupMember.NON_GROUP_MEMBER):
                raise ExchangeError("the process group was closed during an exchange")
            return [getattr(group, move)([x], peer, 0) for move, x, peer in moves]
        how = {"send": dist.isend, "recv": dist.irecv}
        return dist.batch_isend_irecv(
            [
                dist.P2POp(how[move], x, self.global_ranks[peer], self.group)
                for move, x, peer in moves
            ]
        )

    def _wait(self, moves: list[tuple[Move, Tensor, int]]) -> None:
        peers = [self.global_ranks[peer] for *_, peer in moves]
        ranks = sorted(set(peers))
        try:
            works = self._begin(moves)
        except RuntimeError as error:
            raise ExchangeError(f"the connection to a rank of {ranks} is gone: {error}") from error
        # NCCL returns one work for all of them
        each = len(works) == len(moves)
        names = [f"rank {peer}" for peer in peers] if each else [f"ranks {ranks}"]
        for work, name in zip(works, names, strict=True):
            self._finish(work, moves[0][1], f"no exchange with {name}")

    def _finish(self, work: Any, x: Tensor, failure: str) -> None:
        self._on_device = x.device.type != "cpu"
        try:
            finish(work, x, self._timeout)
        except (RuntimeError, TimeoutError) as error:
            self._failed = True
            raise ExchangeError(f"{failure}: {error}") from error
