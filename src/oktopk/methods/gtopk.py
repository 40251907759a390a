"""`gtopk`: exact top k, merged pairwise in a tree, k kept at every node (Shi et al., ICDCS 2019).

A node may cut a sum whose index survives through another branch, or round it. The published method
loses that; here it goes to the residual of the node that cut it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.methods import selection
from oktopk.methods.base import SparseMethod, SparseSum, codec_for
from oktopk.methods.cost_model import Cost, Work
from oktopk.methods.selection import top_entries
from oktopk.methods.state import MethodState
from oktopk.sparse import Sparse, empty
from oktopk.wire import message
from oktopk.wire.codec import (
    CodecName,
    EntryRange,
    allocate_entries,
    is_exact,
    sizes_to_tell,
    told_ranges,
)


class Packet(NamedTuple):
    """A message between two nodes, and what its receiver is told of it ahead."""

    words: Tensor
    entries: EntryRange


@dataclass(frozen=True, slots=True)
class Node:
    """What a rank knows in the tree: the communicator, the codec, and the sizes of the vectors."""

    comm: Comm
    codec: CodecName
    like: Sparse
    num_dense: int

    def encode(self, entries: Sparse, dense_part: Tensor) -> tuple[Packet, list[Sparse]]:
        """The message of some entries, and what rounding takes off them, if anything."""
        entry_range = EntryRange(entries.num, 0, entries.numel)
        words, decoded, told = message.write(
            entries.indices, entries.values, entry_range, self.codec, dense_part
        )
        if is_exact(self.codec):
            return Packet(words, told), []
        lost = Sparse(entries.indices, entries.values - decoded, entries.numel)
        return Packet(words, told), [lost]

    def decode(self, packet: Packet) -> tuple[Sparse, Tensor]:
        """The entries of a message, and what travels dense beside them."""
        indices, _, values, _ = allocate_entries([packet.entries], self.like.values)
        dense_part = message.read(packet.words, packet.entries, self.codec, indices, values)
        return Sparse(indices, values, self.like.numel), dense_part

    def send_and_receive(
        self, packet: Packet | None, target: int | None, source: int | None, stage: str
    ) -> Packet | None:
        """Send a message along one edge; return what came along another.

        None for `target` or `source` means that this rank has no such edge in this round. Every
        rank calls it in every round all the same: its sizes travel with those of all others.
        """
        device, dtype, numel = self.like.values.device, self.like.values.dtype, self.like.numel
        sent = packet.entries if packet is not None else EntryRange(0, 0, numel, num_index_words=0)
        told = sizes_to_tell(sent, self.codec)
        told = self.comm.send_recv_sizes(told, target, source, device, stage=stage)
        (entries,) = told_ranges(told, self.codec, [(0, numel)])
        sizes = {}
        if source is not None:
            sizes[source] = message.num_words(entries, self.codec, dtype, self.num_dense)
        outgoing = {target: packet.words} if target is not None and packet is not None else {}
        received = self.comm.exchange(outgoing, sizes, device, stage=stage)
        return None if source is None else Packet(received[source], entries)


def exchange(
    local: Sparse, dense_part: Tensor, k: int, state: MethodState, codec: CodecName, comm: Comm
) -> SparseSum:
    """Merge pairwise up a binomial tree, then pass the k entries of the root down.

    A rank sends 2k words up and 2k to each child on the way down; 4k log P pass on the longest way.
    """
    node = Node(comm, codec_for(local.values, codec), local, dense_part.numel())
    strides = [1 << level for level in range((comm.size - 1).bit_length())]
    entries, dense_sum, cut, num_sent = _merge_up(node, strides, local, dense_part, k)
    packet = None
    if comm.rank == 0:  # every rank reads the words of the root, the root too: so all bits agree
        packet, lost = node.encode(entries, dense_sum)
        entries, _ = node.decode(packet)
        cut += lost
    for stride in reversed(strides):
        child, parent = _tree_edges(comm, stride)
        received = node.send_and_receive(packet, child, parent, "broadcast")
        num_sent += entries.num + dense_part.numel() if child is not None else 0
        if received is not None:
            packet = received
            entries, dense_sum = node.decode(packet)
    corrections = tuple(_filtered(sums, entries, keep_common=True) for sums in cut)
    return SparseSum(entries, local, dense_sum, corrections=corrections, num_sent=num_sent)


def _merge_up(
    node: Node, strides: list[int], local: Sparse, dense_part: Tensor, k: int
) -> tuple[Sparse, Tensor, list[Sparse], int]:
    """This rank's entries at the root or when it hands them on, and what was cut off on the way."""
    entries, dense_sum, num_sent = local, dense_part.clone(), 0
    cut: list[Sparse] = []
    for stride in strides:
        child, parent = _tree_edges(node.comm, stride)
        packet = None
        if parent is not None:
            packet, lost = node.encode(entries, dense_sum)
            cut += lost
            num_sent += entries.num + dense_part.numel()
        received = node.send_and_receive(packet, parent, child, "reduce")
        if received is not None:
            theirs, their_dense = node.decode(received)
            both = _merge_two(entries, theirs)
            entries = top_entries(both, k)
            cut.append(_filtered(both, entries, keep_common=False))
            dense_sum += their_dense
    return entries, dense_sum, cut, num_sent


def _tree_edges(comm: Comm, stride: int) -> tuple[int | None, int | None]:
    """This rank's child and parent in the round of a stride; None where there is none."""
    if comm.rank % stride:
        return None, None
    if comm.rank & stride:
        return None, comm.rank - stride
    child = comm.rank + stride
    return (child if child < comm.size else None), None


def _merge_two(a: Sparse, b: Sparse) -> Sparse:
    indices, values = torch.cat([a.indices, b.indices]), torch.cat([a.values, b.values])
    return kernels.merge(indices, values, [a.num, b.num], 0, a.numel)


def _filtered(sparse: Sparse, other: Sparse, *, keep_common: bool) -> Sparse:
    """The entries whose index is in the other selection, or those whose index is not."""
    if not other.num:
        return empty(sparse.numel, sparse.values) if keep_common else sparse
    place = torch.searchsorted(other.indices, sparse.indices).clamp_(max=other.num - 1)
    keep = (other.indices[place] == sparse.indices) == keep_common
    return Sparse(sparse.indices[keep], sparse.values[keep], sparse.numel)


def cost(work: Work) -> Cost:
    """Up and down the longest way of the tree."""
    levels = math.ceil(math.log2(work.size)) if work.size > 1 else 0
    return Cost(
        rounds=4 * levels,
        bytes=2 * levels * work.kept * work.entry_bytes,
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
