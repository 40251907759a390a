# SPDX-License-Identifier: Apache-2.0
"""`gtopk`: exact top k, merged pairwise in a tree, k kept at every node (Shi et al., ICDCS 2019).

A node may cut a sum whose index survives through another branch, or round it. The published method
loses that; here it goes to the residual of the node that cut it.

To average over senders, the numbers of senders travel up the tree, one more word for each entry,
and the root divides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oktopk import kernels, wire
from oktopk.comm.communicator import Comm
from oktopk.methods import selection
from oktopk.methods.base import (
    Average,
    Cost,
    MethodState,
    SparseMethod,
    SparseSum,
    Work,
    at_indices,
    codec_for,
    correction,
    divided,
)
from oktopk.methods.selection import top_entries
from oktopk.sparse import Sparse, empty
from oktopk.wire import (
    CodecName,
    EntryRange,
    allocate_entries,
    is_possible,
    sizes_to_tell,
    told_ranges,
)


class Packet(NamedTuple):
    """A message between two nodes, and what its receiver is told of it ahead."""

    words: Tensor
    entries: EntryRange
    sender: int


@dataclass(frozen=True, slots=True)
class Partial:
    """The sums of a part of the tree."""

    entries: Sparse
    dense_sum: Tensor
    num_senders: Tensor | None
    """How many ranks sent each entry; None if it is not asked for."""

    @property
    def tail(self) -> Tensor:
        """What travels dense behind the entries on the way up."""
        if self.num_senders is None:
            return self.dense_sum
        return torch.cat([self.dense_sum, self.num_senders])


@dataclass(frozen=True, slots=True)
class Node:
    """What a rank knows in the tree: the communicator, the codec, and the sizes of the vectors."""

    comm: Comm
    codec: CodecName
    like: Sparse
    num_dense: int
    counts_senders: bool

    def encode(self, entries: Sparse, dense_part: Tensor) -> tuple[Packet, Tensor]:
        """The message of some entries, and their values as they will be decoded."""
        entry_range = EntryRange(entries.num, 0, entries.numel)
        words, decoded, told = wire.write_message(
            entries.indices, entries.values, entry_range, self.codec, dense_part
        )
        return Packet(words, told, self.comm.rank), decoded

    def decode(self, packet: Packet) -> tuple[Sparse, Tensor]:
        """The entries of a message, and what travels dense beside them."""
        indices, _, values, _ = allocate_entries([packet.entries], self.like.values)
        into = indices, values
        dense_part, is_sound = wire.read_message(packet.words, packet.entries, self.codec, *into)
        self.comm.expect(is_sound, packet.sender)
        return Sparse(indices, values, self.like.numel), dense_part

    def decode_partial(self, packet: Packet) -> Partial:
        """The sums of a child's part of the tree."""
        entries, tail = self.decode(packet)
        num_senders = tail[self.num_dense :] if self.counts_senders else None
        return Partial(entries, tail[: self.num_dense], num_senders)

    def send_and_receive(
        self, packet: Packet | None, target: int | None, source: int | None, *, up: bool
    ) -> Packet | None:
        """Send a message along one edge; return what came along another.

        None for `target` or `source` means that this rank has no such edge in this round. Every
        rank calls it in every round all the same: its sizes travel with those of all others.
        """
        device, dtype, numel = self.like.values.device, self.like.values.dtype, self.like.numel
        stage = "reduce" if up else "broadcast"
        sent = packet.entries if packet is not None else EntryRange(0, 0, numel, num_index_words=0)
        told = sizes_to_tell(sent, self.codec)
        told = self.comm.send_recv_sizes(told, target, source, device, stage=stage)
        (entries,) = told_ranges(told, self.codec, [(0, numel)])
        sizes = {}
        if source is not None:
            self.comm.expect(is_possible(entries, self.codec, dtype), source)
            num_dense = self.num_dense + (entries.count if up and self.counts_senders else 0)
            sizes[source] = wire.message_words(entries, self.codec, dtype, num_dense)
        outgoing = {target: packet.words} if target is not None and packet is not None else {}
        received = self.comm.exchange(outgoing, sizes, device, stage=stage)
        return None if source is None else Packet(received[source], entries, source)


def exchange(
    local: Sparse,
    dense_part: Tensor,
    k: int,
    state: MethodState,
    codec: CodecName,
    comm: Comm,
    average: Average = "all",
) -> SparseSum:
    """Merge pairwise up a binomial tree, then pass the k entries of the root down.

    A rank sends 2k words up and 2k to each child on the way down; 4k log P pass on the longest way.
    Averaged over senders, it sends k more words up.
    """
    counts_senders = average == "senders"
    codec = codec_for(local.values, codec)
    node = Node(comm, codec, local, dense_part.numel(), counts_senders)
    strides = [1 << level for level in range((comm.size - 1).bit_length())]
    num_senders = torch.ones_like(local.values) if counts_senders else None
    start = Partial(local, dense_part.clone(), num_senders)
    partial, cut, num_sent = _merge_up(node, strides, start, k)
    entries, dense_sum, packet = partial.entries, partial.dense_sum, None
    if comm.rank == 0:  # every rank reads the words of the root, the root too: so all bits agree
        means = divided(entries, partial.num_senders)
        packet, decoded = node.encode(means, dense_sum)
        cut += correction(entries, decoded, partial.num_senders, codec)
        entries, _ = node.decode(packet)
    for stride in reversed(strides):
        child, parent = _tree_edges(comm, stride)
        received = node.send_and_receive(packet, child, parent, up=False)
        num_sent += entries.num + dense_part.numel() if child is not None else 0
        if received is not None:
            packet = received
            entries, dense_sum = node.decode(packet)
    corrections = tuple(_filtered(sums, entries, keep_common=True) for sums in cut)
    return SparseSum(entries, local, dense_sum, corrections=corrections, num_sent=num_sent)


def _merge_up(
    node: Node, strides: list[int], partial: Partial, k: int
) -> tuple[Partial, list[Sparse], int]:
    """This rank's sums at the root or when it hands them on, and what was cut off on the way."""
    cut: list[Sparse] = []
    num_sent = 0
    for stride in strides:
        child, parent = _tree_edges(node.comm, stride)
        packet, entries = None, partial.entries
        if parent is not None:
            packet, decoded = node.encode(entries, partial.tail)
            cut += correction(entries, decoded, None, node.codec)
            num_sent += entries.num + node.num_dense
        received = node.send_and_receive(packet, parent, child, up=True)
        if received is not None:
            both = _merge_two(partial, node.decode_partial(received))
            partial = _largest(both, k)
            cut.append(_filtered(both.entries, partial.entries, keep_common=False))
    return partial, cut, num_sent


def _tree_edges(comm: Comm, stride: int) -> tuple[int | None, int | None]:
    """This rank's child and parent in the round of a stride; None where there is none."""
    if comm.rank % stride:
        return None, None
    if comm.rank & stride:
        return None, comm.rank - stride
    child = comm.rank + stride
    return (child if child < comm.size else None), None


def _merge_two(a: Partial, b: Partial) -> Partial:
    dense_sum = a.dense_sum + b.dense_sum
    entries = _merge_entries(a.entries, b.entries)
    if a.num_senders is None or b.num_senders is None:
        return Partial(entries, dense_sum, None)
    counted = [
        Sparse(part.entries.indices, num, part.entries.numel)
        for part, num in ((a, a.num_senders), (b, b.num_senders))
    ]
    return Partial(entries, dense_sum, _merge_entries(*counted).values)


def _merge_entries(a: Sparse, b: Sparse) -> Sparse:
    indices, values = torch.cat([a.indices, b.indices]), torch.cat([a.values, b.values])
    return kernels.merge(indices, values, [a.num, b.num], 0, a.numel)


def _largest(partial: Partial, k: int) -> Partial:
    """The k largest sums."""
    entries, num_senders = top_entries(partial.entries, k), partial.num_senders
    if num_senders is not None:
        num_senders = at_indices(num_senders, partial.entries, entries)
    return Partial(entries, partial.dense_sum, num_senders)


def _filtered(sparse: Sparse, other: Sparse, *, keep_common: bool) -> Sparse:
    """The entries whose index is in the other selection, or those whose index is not."""
    if not other.num:
        return empty(sparse.numel, sparse.values) if keep_common else sparse
    place = torch.searchsorted(other.indices, sparse.indices).clamp_(max=other.num - 1)
    keep = (other.indices[place] == sparse.indices) == keep_common
    return Sparse(sparse.indices[keep], sparse.values[keep], sparse.numel)


def cost(work: Work) -> Cost:
    """Up and down the longest way of the tree. Each of its P-1 edges carries k entries twice."""
    levels = math.ceil(math.log2(work.size)) if work.size > 1 else 0
    message = work.sparse_bytes(work.kept) + work.dense_bytes
    return Cost(
        rounds=4 * levels,
        bytes=2 * levels * message,
        sent=2 * message * (work.size - 1) / work.size,
        elements=work.numel,
        entries=4 * levels * work.kept,
    )


METHOD = SparseMethod(
    name="gtopk",
    summary="exact top k, merged pairwise in a tree, k kept at every node",
    words="2k up, 2k to each of at most log P children down",
    cost=cost,
    keeps_k=True,
    select=selection.exact,
    exchange=exchange,
)
