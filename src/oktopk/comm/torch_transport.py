"""The transport over a torch process group: the only place that calls its collectives."""

from __future__ import annotations

from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor

from oktopk.errors import ExchangeError
from oktopk.utils.device import finish

TIMEOUT = 300.0  # seconds; less than NCCL's own limit of 600, which ends the process


CLOSE_SECONDS = 5.0


class TorchTransport:
    """A torch process group; `None` is the default group.

    `timeout` seconds are the limit for each operation on a GPU, where the host would otherwise wait
    without end. On a CPU the limit is that of the process group.
    """

    def __init__(self, group: Any = None, *, owned: bool = False, timeout: float = TIMEOUT) -> None:
        self.group: Any = group
        self._owned = owned
        self._timeout = timeout
        self._on_device = self._failed = False
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} of the job is not in the group it was given")
        self.size = dist.get_world_size(group)
        self._peers = [
            peer if group is None else dist.get_global_rank(group, peer)
            for peer in range(self.size)
        ]

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        ops, peers = [], []
        for distance in range(1, self.size):  # rotated: no two ranks aim at the same peer at once
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if source in incoming:
                ops.append(self._op(dist.irecv, incoming[source], source))
                peers.append(source)
            if target in outgoing:
                ops.append(self._op(dist.isend, outgoing[target], target))
                peers.append(target)
        if ops:
            self._wait(ops, peers)

    def _wait(self, ops: list[dist.P2POp], peers: list[int]) -> None:
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            ranks = sorted(set(peers))
            raise ExchangeError(f"the connection to a rank of {ranks} is gone: {error}") from error
        # NCCL returns one work for all of them
        each = len(works) == len(ops)
        whom = [f"rank {peer}" for peer in peers] if each else [f"ranks {sorted(set(peers))}"]
        for work, who in zip(works, whom, strict=True):
            self._finish(work, ops[0].tensor, f"no exchange with {who}")

    def _finish(self, work: Any, x: Tensor, failure: str) -> None:
        self._on_device = x.device.type != "cpu"
        try:
            finish(work, x, self._timeout)
        except (RuntimeError, TimeoutError) as error:
            self._failed = True
            raise ExchangeError(f"{failure}: {error}") from error

    def swap(self, x: Tensor, out: Tensor) -> None:
        out[self.rank].copy_(x[self.rank])
        peers = [peer for peer in range(self.size) if peer != self.rank] if x[0].numel() else []
        self.exchange({peer: x[peer] for peer in peers}, {peer: out[peer] for peer in peers})

    def _op(self, op, tensor: Tensor, peer: int) -> dist.P2POp:  # noqa: ANN001
        return dist.P2POp(op, tensor, self._peers[peer], self.group)

    def all_reduce_(self, x: Tensor) -> None:
        failure = "the dense allreduce failed"
        try:
            work = dist.all_reduce(x, group=self.group, async_op=True)
        except RuntimeError as error:
            raise ExchangeError(f"{failure}: {error}") from error
        self._finish(work, x, failure)

    def store(self) -> Any:
        """The store of the group, over a connection of its own where torch can make one."""
        store: Any = dist.distributed_c10d._get_process_group_store(self.group)
        return store.clone() if hasattr(store, "clone") else store

    def close(self) -> None:
        """Nothing but this may hold the group: its connections close with the last reference."""
        if not self._owned:
            return
        self._owned = False
        group, self.group = self.group, dist.GroupMember.NON_GROUP_MEMBER
        if not self._on_device:
            dist.destroy_process_group(group)
            return
        # NCCL ends what it has begun before it destroys a group, and waits for dead ranks to do so
        abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
        end = abort if self._failed else dist.destroy_process_group
        leaving = Thread(target=end, args=(group,), name="oktopk-leave", daemon=True)
        leaving.start()
        leaving.join(CLOSE_SECONDS)
