"""`Comm`: the one door to the network.

Methods call these few collectives and nothing else, so bytes are counted once, here, and the same
method runs over a torch process group or over simulated ranks. All of them but the dense allreduce
send straight from rank to rank, with all receives posted at once: one round, uneven sizes, and no
copy of a buffer per peer.

Every rank must call the same collectives in the same order. Empty messages are not sent: both sides
know the sizes, so both leave them out.
"""

from __future__ import annotations

from threading import Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.host import finish, to_device
from oktopk.ledger import Ledger, dense_allreduce, messages


class Transport(Protocol):
    """What carries the messages: a torch process group, or simulated ranks."""

    rank: int
    size: int

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        """Send outgoing[p] to rank p and fill incoming[p] from it; none of them is empty."""
        ...

    def swap(self, x: Tensor, out: Tensor) -> None:
        """Row p of x becomes row `rank` of out on rank p. P rows of one size, own row included."""
        ...

    def all_reduce_(self, x: Tensor) -> None:
        """Sum over ranks, in place; the same bits everywhere."""
        ...

    def close(self) -> None:
        """Give up what it holds. Nothing may be sent afterwards."""
        ...


class ExchangeError(RuntimeError):
    """A message could not be sent or did not come: a rank died, stopped or went another way."""


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


class Comm:
    """The collectives of the methods over a transport, and the ledger of what they cost."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        self.ledger = Ledger()
        self.alarm = False
        """Raise it and every rank's is raised by its next exchange: it rides on the sizes."""
        self.transport = transport

    def close(self) -> None:
        """Give the transport up."""
        self.transport.close()

    def all_reduce_(self, x: Tensor, *, stage: str) -> Tensor:
        """Sum in place: the dense exchange. 2n(P-1)/P elements sent."""
        self.transport.all_reduce_(x)
        traffic = dense_allreduce(x.nbytes, self.size)
        self.ledger.add(stage, traffic, [x.nbytes // self.size] * traffic.messages_sent)
        return x

    def all_gather(self, x: Tensor, *, stage: str) -> Tensor:
        """Header of equal size from every rank, as rows in rank order. len(x)(P-1) sent."""
        return self._swap(x.expand(self.size, *x.shape), stage)

    def all_gather_size(self, num: int, device: torch.device, *, stage: str) -> list[int]:
        """One number of every rank, in rank order. Header: 4(P-1) bytes."""
        return self._hear(self.all_gather(self._announce([num], device), stage=stage))

    def sum_small(self, x: Tensor, *, stage: str) -> Tensor:
        """Sum a header of integers. Two rounds, 2 ceil(len/P)(P-1) elements sent: flat in P."""
        mine = self._swap(equal_shares(x, self.size), stage).sum(0, dtype=x.dtype)
        return self.all_gather(mine, stage=stage).view(-1)[: x.numel()]

    def swap_sizes(self, sizes: list[int], device: torch.device, *, stage: str) -> list[int]:
        """Tell every rank its number and hear theirs, in rank order. Header: 4(P-1) bytes."""
        return self._hear(self._swap(self._announce(sizes, device).unsqueeze(1), stage))

    def exchange(
        self,
        outgoing: dict[int, Tensor],
        sizes: dict[int, int],
        device: torch.device,
        *,
        stage: str,
    ) -> dict[int, Tensor]:
        """Send words to ranks, and get so many words of others; both sides know the sizes.

        Empty messages are not sent; they come back empty. Words are int32.
        """
        room = torch.empty(sum(sizes.values()), dtype=torch.int32, device=device)
        heard = dict(zip(sizes, room.split(list(sizes.values())), strict=True))
        self._exchange(
            {rank: message for rank, message in outgoing.items() if message.numel()},
            {rank: message for rank, message in heard.items() if message.numel()},
            stage,
        )
        return heard

    def shift(
        self, size: int, to: int | None, source: int | None, device: torch.device, *, stage: str
    ) -> int:
        """Tell one rank a number and hear another's; None is nobody, who says 0. One int32."""
        said = self._announce([size], device)
        heard = torch.zeros_like(said)
        announce = {to: said} if to is not None else {}
        self._exchange(announce, {source: heard} if source is not None else {}, stage, header=True)
        return self._hear(heard)[0]

    def _announce(self, sizes: list[int], device: torch.device) -> Tensor:
        """Sizes as a header; their complement, which is negative, while the alarm is raised."""
        said = [~size for size in sizes] if self.alarm else sizes
        return to_device(said, torch.int32, device)

    def _hear(self, header: Tensor) -> list[int]:
        heard = header.view(-1).tolist()
        self.alarm = self.alarm or any(size < 0 for size in heard)
        return [size if size >= 0 else ~size for size in heard]

    def _swap(self, x: Tensor, stage: str) -> Tensor:
        out = x.new_empty(x.shape)
        self.transport.swap(x, out)
        rows = [x[0].nbytes] * (self.size - 1)
        self.ledger.add(stage, messages(rows, rows, header=True), rows)
        return out

    def _exchange(
        self,
        outgoing: dict[int, Tensor],
        incoming: dict[int, Tensor],
        stage: str,
        *,
        header: bool = False,
    ) -> None:
        self.transport.exchange(outgoing, incoming)
        sent = [message.nbytes for message in outgoing.values()]
        received = [message.nbytes for message in incoming.values()]
        self.ledger.add(stage, messages(sent, received, header=header), sent)


def equal_shares(x: Tensor, size: int) -> Tensor:
    """A flat tensor as P rows of equal length, zeros at the end."""
    shares = x.new_zeros(size, -(-x.numel() // size))
    shares.view(-1)[: x.numel()] = x
    return shares
