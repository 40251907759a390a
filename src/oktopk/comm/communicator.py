# SPDX-License-Identifier: Apache-2.0
"""`Comm`: the collectives that methods use, and the ledger of the bytes they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import add, attrgetter, sub
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from oktopk import kernels
from oktopk.errors import MessageError
from oktopk.utils.device import to_device

# The ledger: bytes and messages that a rank sent and received, by stage; headers are apart.


@dataclass(slots=True)
class Traffic:
    """Bytes and messages of one rank. Payload is gradient entries; headers are sizes and counts."""

    payload_sent: int = 0
    """Bytes of gradient entries that were sent."""

    header_sent: int = 0
    """Bytes of sizes, counts, bounds and checksums that were sent."""

    messages_sent: int = 0
    """Messages that were sent; empty ones never are."""

    payload_received: int = 0
    """Bytes of gradient entries that were received."""

    header_received: int = 0
    """Bytes of sizes, counts, bounds and checksums that were received."""

    messages_received: int = 0
    """Messages that were received."""

    @property
    def sent(self) -> int:
        """All bytes that were sent."""
        return self.payload_sent + self.header_sent

    @property
    def received(self) -> int:
        """All bytes that were received."""
        return self.payload_received + self.header_received

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, _counts(self), _counts(other)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*map(sub, _counts(self), _counts(other)))


_counts = attrgetter(*(each.name for each in fields(Traffic)))  # looked up once: it is added often


def messages(sent: Iterable[int], received: Iterable[int], *, header: bool) -> Traffic:
    """Count messages of the given sizes. Empty ones are never sent, so they do not count."""
    sent, received = [b for b in sent if b], [b for b in received if b]
    kind = "header" if header else "payload"
    return Traffic(
        **{f"{kind}_sent": sum(sent), f"{kind}_received": sum(received)},
        messages_sent=len(sent),
        messages_received=len(received),
    )


def dense_allreduce(nbytes: int, size: int) -> Traffic:
    """Count a dense allreduce as reduce-scatter and allgather: each rank sends 2n(P-1)/P elements.

    The process group chooses the algorithm. Every bandwidth-optimal one sends this much.
    """
    share, num = 2 * nbytes * (size - 1) // size, 2 * (size - 1) if nbytes else 0
    return Traffic(
        payload_sent=share, payload_received=share, messages_sent=num, messages_received=num
    )


@dataclass(slots=True)
class Ledger:
    """Traffic by stage (`split`, `gather`, ...), counted from the start."""

    stages: dict[str, Traffic] = field(default_factory=dict)
    sizes: dict[str, Counter[int]] = field(default_factory=dict)
    """Messages sent, by stage and by the bit length of their size: 11 is from 1 to 2 KiB."""

    def add(self, stage: str, traffic: Traffic, sent: Iterable[int]) -> None:
        """Add the traffic of some messages; `sent` has the bytes of each that was sent."""
        self.stages[stage] = self.stages.get(stage, Traffic()) + traffic
        sizes = self.sizes.setdefault(stage, Counter())
        sizes.update(size.bit_length() for size in sent if size)

    def total(self) -> Traffic:
        # a copy: another thread may add a stage meanwhile
        return sum(list(self.stages.values()), Traffic())

    def snapshot(self) -> dict[str, Traffic]:
        """Return the counts until now, for `since`."""
        return dict(self.stages)

    def since(self, before: dict[str, Traffic]) -> dict[str, Traffic]:
        """Return what was added after the snapshot `before`, by stage."""
        return {
            stage: traffic - before.get(stage, Traffic()) for stage, traffic in self.stages.items()
        }


# `Comm`: the collectives that methods use, and the count of the bytes they send.
#
# Methods send through a `Comm` and in no other way. So bytes are counted in one place, and the
# same method runs over a torch process group or over simulated ranks.
#
# There are two kinds of collectives, and the ledger keeps their bytes apart:
#
# - Payload collectives carry gradient entries. Their messages may have a different size for every
#   pair of ranks, and both sides know the sizes before they call.
# - Header collectives carry a few integers of fixed size: the sizes of the messages that follow,
#   counts, checksums. Ranks need no prior knowledge to call them.
#
# All of them but the dense allreduce send directly from rank to rank, with all receives posted at
# once: one round, and no copy of a buffer per peer. Every rank must call the same collectives in
# the same order. An empty message is not sent: both sides know that its size is 0.


class Transport(Protocol):
    """Carries messages between ranks: a torch process group, or simulated ranks.

    Where its ranks have other numbers in the job, a transport has these in `global_ranks`, for
    messages.
    """

    rank: int
    size: int

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        """Send outgoing[p] to rank p and fill incoming[p] from rank p; no message is empty."""
        ...

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        """Copy row p of x to row `rank` of `out` on rank p. All P rows have one size."""
        ...

    def all_reduce_(self, x: Tensor) -> None:
        """Sum over ranks in place. Every rank gets the same bits."""
        ...

    def split(self, groups: list[list[int]]) -> Transport:
        """Return a transport over this rank's group; every rank calls it with the same groups."""
        ...

    def close(self) -> None:
        """Release the connections, those of subgroups included. Nothing may be sent afterwards."""
        ...


def global_ranks_of(transport: Transport) -> Sequence[int]:
    """The numbers that the ranks of a transport have in the job, by which messages name them."""
    return getattr(transport, "global_ranks", range(transport.size))


class Comm:
    """The collectives of the methods over a transport, with a ledger of the bytes they sent.

    `oktopk.simulate` and the handles make one. To exchange over a transport of your own, write a
    class with the methods of `oktopk.comm.communicator.Transport` and pass `Comm(transport)` as
    `comm=` to `attach`, `local_steps` or `Reducer`.
    """

    def __init__(self, transport: Transport, ledger: Ledger | None = None) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        self.global_ranks = global_ranks_of(transport)
        """What each rank is called in messages: its number in the job."""

        self.ledger = Ledger() if ledger is None else ledger
        self.nonfinite = False
        """Whether this rank, or a rank it got a size from, had a NaN or Inf in its gradient.

        A rank that finds one sets it. The collectives that exchange sizes then set it on the other
        ranks, at no cost in bytes (`_encode_sizes`).
        """
        self.is_attached = False
        """Whether an attached model uses it. Two would mix their collectives."""

        self.transport = transport
        self._unread: list[tuple[Tensor, int]] = []
        """Messages of which a device knows whether they are sound, and the ranks they are of."""

    @property
    def global_rank(self) -> int:
        """What this rank is called in messages: its number in the job."""
        return self.global_ranks[self.rank]

    def begin_step(self) -> None:
        """Forget what the collectives of the step before have noticed."""
        self.nonfinite = False
        self._unread.clear()

    def expect(self, is_sound: Tensor | bool, peer: int) -> None:
        """Raise MessageError if what came from rank `peer` is not sound.

        Where the host would wait for a device to know it, `raise_unsound` will do so.
        """
        if isinstance(is_sound, bool) or kernels.is_synchronous(is_sound):
            if not is_sound:
                self._refuse(peer)
        else:
            self._unread.append((is_sound, peer))

    def raise_unsound(self) -> None:
        """Raise MessageError if a message of this step was not sound.

        To be called where a sum of the step is not finite: values of such messages become NaN, so
        no other step has to wait for the device to ask.
        """
        for is_sound, peer in self._unread:
            if not is_sound:
                self._refuse(peer)

    def _refuse(self, peer: int) -> None:
        them = f"rank {self.global_ranks[peer]}"
        raise MessageError(
            f"rank {self.global_rank}: what came from {them} is no message of this exchange: its "
            f"sizes or indices cannot be. It was damaged on the way or in the memory of {them}. "
            "Nothing of it was applied; start again from a checkpoint"
        )

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        """Return a `Comm` over the group that has this rank, with ranks numbered from 0 in order.

        Every rank must call it with the same `groups`, which together have each rank once:
        `comm.split([[0, 1], [2, 3]])` gives ranks 2 and 3 a `Comm` in which they are ranks 0 and 1.
        The bytes are added to the ledger of this `Comm`. The `nonfinite` flag is not shared.

        Args:
            groups: lists of ranks, the same on every rank.

        Raises:
            ValueError: a rank is missing from `groups`, or is there twice.
        """
        parts = [sorted(group) for group in groups if group]
        if sorted(rank for part in parts for rank in part) != list(range(self.size)):
            raise ValueError(f"groups must have each rank below {self.size} once, got {groups}")
        return Comm(self.transport.split(parts), self.ledger)

    def close(self) -> None:
        """Release the connections, those of subgroups included."""
        self.transport.close()

    # Payload collectives: gradient entries.

    def all_reduce_(self, x: Tensor, *, stage: str) -> Tensor:
        """Sum in place: the dense exchange. Payload: 2n(P-1)/P elements sent."""
        self.transport.all_reduce_(x)
        traffic = dense_allreduce(x.nbytes, self.size)
        self.ledger.add(stage, traffic, [x.nbytes // self.size] * traffic.messages_sent)
        return x

    def exchange(
        self,
        outgoing: dict[int, Tensor],
        sizes: dict[int, int],
        device: torch.device,
        *,
        stage: str,
    ) -> dict[int, Tensor]:
        """Send int32 words to ranks and receive `sizes[p]` words from each rank p in `sizes`.

        Payload: the words. Empty messages are not sent; the receiver returns them empty.
        """
        buffer = torch.empty(sum(sizes.values()), dtype=torch.int32, device=device)
        received = dict(zip(sizes, buffer.split(list(sizes.values())), strict=True))
        self._exchange(
            {rank: message for rank, message in outgoing.items() if message.numel()},
            {rank: message for rank, message in received.items() if message.numel()},
            stage,
        )
        return received

    def reduce_scatter(self, x: Tensor, *, stage: str) -> Tensor:
        """Sum row p of x over ranks on rank p, in rank order. Payload: P-1 of its P rows sent."""
        rows = self._all_to_all(x, stage, header=False)
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total

    def all_gather(self, x: Tensor, *, stage: str) -> Tensor:
        """Gather tensors of one size as rows in rank order. Payload: len(x)(P-1) elements sent."""
        return self._all_to_all(x.expand(self.size, *x.shape), stage, header=False)

    # Header collectives: integers of fixed size.

    def all_gather_header(self, x: Tensor, *, stage: str) -> Tensor:
        """Gather tensors of one size as rows in rank order. Header: len(x)(P-1) elements sent."""
        return self._all_to_all(x.expand(self.size, *x.shape), stage)

    def all_reduce_header(self, x: Tensor, *, stage: str) -> Tensor:
        """Sum integers over ranks. Header: 2 ceil(len/P)(P-1) elements, in two rounds.

        One rank's bytes hardly depend on P, unlike those of `all_gather_header`.
        """
        mine = self._all_to_all(equal_shares(x, self.size), stage).sum(0, dtype=x.dtype)
        return self.all_gather_header(mine, stage=stage).view(-1)[: x.numel()]

    def all_gather_size(self, size: int, device: torch.device, *, stage: str) -> list[int]:
        """Gather one size from every rank, in rank order. Header: 4(P-1) bytes."""
        return self.all_gather_sizes([size], device, stage=stage)

    def all_gather_sizes(self, sizes: list[int], device: torch.device, *, stage: str) -> list[int]:
        """Gather as many sizes from every rank, in rank order. Header: 4 len(sizes)(P-1) bytes."""
        header = self._encode_sizes(sizes, device)
        return self._decode_sizes(self.all_gather_header(header, stage=stage))

    def all_to_all_sizes(self, sizes: list[int], device: torch.device, *, stage: str) -> list[int]:
        """Send sizes[p] to each rank p; return what they sent, in rank order. Header: 4(P-1) bytes.

        There may be several sizes for each rank, one rank's after the other's, both in `sizes` and
        in the result. Ranks call it before an `exchange` whose message sizes only the senders know.
        """
        header = self._encode_sizes(sizes, device).view(self.size, -1)
        return self._decode_sizes(self._all_to_all(header, stage))

    def send_recv_sizes(
        self, sizes: list[int], to: int | None, source: int | None, device: torch.device, *,
        stage: str,
    ) -> list[int]:  # fmt: skip
        """Send sizes to rank `to` and return those from rank `source`. Header: 4 bytes for each.

        With `to=None` nothing is sent; with `source=None` nothing is received, and all are 0.
        """
        sent = self._encode_sizes(sizes, device)
        received = torch.zeros_like(sent)
        outgoing = {to: sent} if to is not None else {}
        incoming = {source: received} if source is not None else {}
        self._exchange(outgoing, incoming, stage, header=True)
        return self._decode_sizes(received)

    def _encode_sizes(self, sizes: list[int], device: torch.device) -> Tensor:
        """Put sizes, and the `nonfinite` flag with them, into a header of int32.

        All ranks must skip a step when one of them has a NaN, so all must learn of it. A flag of
        its own would cost a collective per step. Instead it rides on the sizes, which every step
        exchanges anyway: a size is never negative, so its sign is free. A rank with the flag set
        sends the bitwise complement ~size = -size - 1, which is negative for every size, 0
        included; the receiver complements it again and has both the size and the flag.
        """
        words = [~size for size in sizes] if self.nonfinite else sizes
        return to_device(words, torch.int32, device)

    def _decode_sizes(self, header: Tensor) -> list[int]:
        """Read sizes from a header; set `nonfinite` if any sender had set it (`_encode_sizes`)."""
        words = header.view(-1).tolist()
        self.nonfinite = self.nonfinite or any(word < 0 for word in words)
        return [word if word >= 0 else ~word for word in words]

    def _all_to_all(self, x: Tensor, stage: str, *, header: bool = True) -> Tensor:
        out = x.new_empty(x.shape)
        self.transport.all_to_all(x, out)
        rows = [x[0].nbytes] * (self.size - 1)
        self.ledger.add(stage, messages(rows, rows, header=header), rows)
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
    """Return a flat tensor as P rows of equal length, with zeros at the end."""
    shares = x.new_zeros(size, -(-x.numel() // size))
    shares.view(-1)[: x.numel()] = x
    return shares


# Broadcast of whole tensors, bit for bit, for the start of a run.


WORD_BYTES = 4


def broadcast_(tensors: Iterable[Tensor], comm: Comm, *, stage: str) -> None:
    """Overwrite the tensors of all ranks with those of rank 0, which sends each to every rank.

    Payload: n(P-1) elements sent by rank 0. One tensor at a time, so that no copy of them all is
    needed.
    """
    for x in map(_distinct, tensors):
        if comm.rank == 0:
            words = _words(x)
            comm.exchange(dict.fromkeys(comm.peers, words), {}, x.device, stage=stage)
        else:
            sizes = {0: -(-x.nbytes // WORD_BYTES)}
            words = comm.exchange({}, sizes, x.device, stage=stage)[0]
            flat = words.view(torch.uint8)[: x.nbytes].view(x.dtype)
            x.detach().copy_(flat.view(x.shape))


def _distinct(x: Tensor) -> Tensor:
    """The entries of a tensor that have memory of their own: an expanded one repeats them."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _words(x: Tensor) -> Tensor:
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    return pad(flat, (0, -flat.numel() % WORD_BYTES)).view(torch.int32)
