"""`Comm`: the one door to the network.

Methods call these few collectives and nothing else, so bytes are counted once, here, and the same
method runs over a torch process group or over simulated ranks. All of them but the dense allreduce
send straight from rank to rank, with all receives posted at once: one round, uneven sizes, and no
copy of a buffer per peer.

Every rank must call the same collectives in the same order. Empty messages are not sent: both sides
know the sizes, so both leave them out.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from oktopk.comm.ledger import Ledger, dense_allreduce, messages
from oktopk.utils.device import to_device


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
