"""`Comm`: the one door to the network.

Methods call these few collectives and nothing else, so bytes are counted once, here, and the same
method runs over a torch process group or over simulated ranks. All of them but the dense allreduce
send straight from rank to rank, with all receives posted at once: one round, uneven sizes, and no
copy of a buffer per peer.

Every rank must call the same collectives in the same order. Empty messages are not sent: both sides
know the sizes, so both leave them out.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

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


class TorchTransport:
    """A torch process group; `None` is the default group."""

    def __init__(self, group: Any = None, *, owned: bool = False) -> None:
        self.group: Any = group
        self._owned = owned
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
            raise ExchangeError(f"the connection to a rank of {peers} is gone: {error}") from error
        # NCCL returns one work for all of them
        for work, peer in zip(works, peers if len(works) == len(ops) else [peers], strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise ExchangeError(f"no exchange with rank {peer}: {error}") from error

    def swap(self, x: Tensor, out: Tensor) -> None:
        out[self.rank].copy_(x[self.rank])
        peers = [peer for peer in range(self.size) if peer != self.rank] if x[0].numel() else []
        self.exchange({peer: x[peer] for peer in peers}, {peer: out[peer] for peer in peers})

    def _op(self, op, tensor: Tensor, peer: int) -> dist.P2POp:  # noqa: ANN001
        return dist.P2POp(op, tensor, self._peers[peer], self.group)

    def all_reduce_(self, x: Tensor) -> None:
        try:
            dist.all_reduce(x, group=self.group)
        except RuntimeError as error:
            raise ExchangeError(f"the dense allreduce failed: {error}") from error

    def store(self) -> Any:
        """The store of the group, over a connection of its own where torch can make one."""
        store: Any = dist.distributed_c10d._get_process_group_store(self.group)
        return store.clone() if hasattr(store, "clone") else store

    def close(self) -> None:
        """Nothing but this may hold the group: its connections close with the last reference."""
        if self._owned:
            self._owned = False
            group, self.group = self.group, dist.GroupMember.NON_GROUP_MEMBER
            dist.destroy_process_group(group)


class Comm:
    """The collectives of the methods over a transport, and the ledger of what they cost."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.ledger = Ledger()
        self.alarm = False
        """Raise it and every rank's is raised by its next exchange: it rides on the sizes."""
        self._transport = transport

    def close(self) -> None:
        """Give the transport up."""
        self._transport.close()

    def all_reduce_(self, x: Tensor, *, stage: str) -> Tensor:
        """Sum in place: the dense exchange. 2n(P-1)/P elements sent."""
        self._transport.all_reduce_(x)
        self.ledger.add(stage, dense_allreduce(x.nbytes, self.size))
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

    def all_to_all(
        self, rows: Tensor, splits: list[int], *, stage: str, incoming: list[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        """Send each peer its run of rows; get theirs, in rank order, with their lengths.

        Without `incoming` the lengths travel first: one int32 per peer.
        """
        if incoming is None:
            sizes = self._announce(splits, rows.device)
            incoming = self._hear(self._swap(sizes.unsqueeze(1), stage))
        out = rows.new_empty(sum(incoming), *rows.shape[1:])
        self._exchange(_runs(rows, splits), _runs(out, incoming), stage)
        return out, incoming

    def gather_rows(self, rows: Tensor, counts: list[int], *, stage: str) -> Tensor:
        """All ranks' rows in rank order; everyone knows the counts. len(rows)(P-1) rows sent."""
        assert len(rows) == counts[self.rank], (len(rows), counts, self.rank)
        out = rows.new_empty(sum(counts), *rows.shape[1:])
        outgoing = dict.fromkeys(range(self.size), rows) if rows.numel() else {}
        self._exchange(outgoing, _runs(out, counts), stage)
        return out

    def shift(self, rows: Tensor, to: int | None, source: int | None, *, stage: str) -> Tensor:
        """Pass rows to one rank and get another's; None is nobody. One int32 goes ahead."""
        size = self._announce([len(rows)], rows.device)
        heard = torch.zeros_like(size)
        announce = {to: size} if to is not None else {}
        self._exchange(announce, {source: heard} if source is not None else {}, stage, header=True)
        out = rows.new_empty(self._hear(heard)[0], *rows.shape[1:])
        outgoing = {to: rows} if to is not None and rows.numel() else {}
        self._exchange(outgoing, {source: out} if source is not None and out.numel() else {}, stage)
        return out

    def _announce(self, sizes: list[int], device: torch.device) -> Tensor:
        """Sizes as a header; their complement, which is negative, while the alarm is raised."""
        said = [~size for size in sizes] if self.alarm else sizes
        return torch.tensor(said, dtype=torch.int32, device=device)

    def _hear(self, header: Tensor) -> list[int]:
        heard = header.view(-1).tolist()
        self.alarm = self.alarm or any(size < 0 for size in heard)
        return [size if size >= 0 else ~size for size in heard]

    def _swap(self, x: Tensor, stage: str) -> Tensor:
        out = x.new_empty(x.shape)
        self._transport.swap(x, out)
        rows = [x[0].nbytes] * (self.size - 1)
        self.ledger.add(stage, messages(rows, rows, header=True))
        return out

    def _exchange(
        self,
        outgoing: dict[int, Tensor],
        incoming: dict[int, Tensor],
        stage: str,
        *,
        header: bool = False,
    ) -> None:
        if self.rank in outgoing:
            incoming.pop(self.rank).copy_(outgoing.pop(self.rank))
        self._transport.exchange(outgoing, incoming)
        sent = (message.nbytes for message in outgoing.values())
        received = (message.nbytes for message in incoming.values())
        self.ledger.add(stage, messages(sent, received, header=header))


def equal_shares(x: Tensor, size: int) -> Tensor:
    """A flat tensor as P rows of equal length, zeros at the end."""
    shares = x.new_zeros(size, -(-x.numel() // size))
    shares.view(-1)[: x.numel()] = x
    return shares


def _runs(rows: Tensor, lengths: list[int]) -> dict[int, Tensor]:
    """The run of rows of each rank that has any."""
    starts = accumulate(lengths, initial=0)
    return {
        rank: rows[start : start + length]
        for rank, (start, length) in enumerate(zip(starts, lengths, strict=False))
        if length
    }
