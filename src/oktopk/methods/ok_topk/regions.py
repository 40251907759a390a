# SPDX-License-Identifier: Apache-2.0
"""Regions: which rank sums which index range, and the split-and-reduce phase built on them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm, equal_shares
from oktopk.errors import MessageError
from oktopk.methods.base import Average, check_told, count_senders
from oktopk.sparse import Sparse
from oktopk.utils.device import to_device, to_host
from oktopk.wire import message
from oktopk.wire.codec import CodecName, EntryRange, is_exact, sizes_to_tell, told_ranges


def equal_bounds(numel: int, size: int) -> list[int]:
    """The P+1 cut points of regions of equal width (widths differ by one at most)."""
    return [rank * numel // size for rank in range(size + 1)]


def single_owner_bounds(numel: int, size: int) -> list[int]:
    """Bounds by which rank 0 owns everything.

    With five ranks or fewer, ranks whose gradients lie in each other's regions cannot have a full
    result within the bound on words. With a single owner they can, because the owner sends nothing
    in split-and-reduce.
    """
    return [0, *[numel] * size]


def balanced_bounds(local: Sparse, comm: Comm) -> list[int]:
    """Bounds that give every region about the same number of selected entries.

    Each rank proposes the cut points that split its own selection into P equal parts. The mean of
    the proposals is taken in int64; means of ascending lists ascend. Header: P-1 int64, summed.
    """
    if local.num:
        starts = equal_bounds(local.num, comm.size)[1:-1]
        proposal = local.indices[to_device(starts, torch.int64, local.values.device)].long()
    else:
        equal = equal_bounds(local.numel, comm.size)[1:-1]
        proposal = to_device(equal, torch.int64, local.values.device)
    (total,) = to_host(comm.all_reduce_header(proposal, stage="bounds"))
    bounds = [0, *(cut // comm.size for cut in total), local.numel]
    if sorted(bounds) != bounds:
        raise MessageError(
            f"rank {comm.global_rank}: the bounds of the regions that the ranks proposed do not "
            f"ascend: {bounds}. A message was damaged; start again from a checkpoint"
        )
    return bounds


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a rank has after split-and-reduce."""

    region: Sparse
    """The sums of the region that this rank owns."""

    num_senders: Tensor | None
    """How many ranks sent each entry of the region; None if it is not asked for."""

    sent: Sparse
    """What this rank contributed, as the receivers decoded it."""

    dense_share: Tensor
    """The sums of this rank's share of what travels dense."""

    num_sent: int
    """Entries that this rank sent."""


def split_reduce(
    local: Sparse,
    dense_part: Tensor,
    bounds: list[int],
    comm: Comm,
    codec: CodecName,
    average: Average = "all",
) -> Reduced:
    """Send every entry to the owner of its region, and sum this rank's region in rank order.

    One message per peer, preceded by the counts. 2k(P-1)/P words when plain and regions are even.
    The owner sees who sent what, so counting the senders costs no byte.
    """
    dtype, rank = local.values.dtype, comm.rank
    splits = _num_per_region(local, bounds)
    shares = equal_shares(dense_part, comm.size)
    outgoing: dict[int, Tensor] = {}
    decoded = list(local.values.split(splits))  # entries of the own region are not encoded
    indices = local.indices.split(splits)
    regions = [EntryRange(num, *ends) for num, ends in zip(splits, pairwise(bounds), strict=True)]
    for peer in comm.peers:
        outgoing[peer], decoded[peer], regions[peer] = message.write(
            indices[peer], decoded[peer], regions[peer], codec, shares[peer]
        )
    lo, hi = bounds[rank], bounds[rank + 1]
    regions[rank] = EntryRange(splits[rank], lo, hi, num_index_words=0)  # nothing is sent
    told = [size for region in regions for size in sizes_to_tell(region, codec)]
    told = comm.all_to_all_sizes(told, local.values.device, stage="split")
    ranges = told_ranges(told, codec, [(lo, hi)] * comm.size)
    check_told(ranges, codec, dtype, comm)
    num_incoming = [entries.count for entries in ranges]
    sizes = {
        peer: message.num_words(ranges[peer], codec, dtype, shares.shape[1]) for peer in comm.peers
    }
    received = comm.exchange(outgoing, sizes, local.values.device, stage="split")
    own = message.Message(indices[rank], decoded[rank], shares[rank])
    all_indices, all_values, dense_share = message.read_all(
        received, ranges, codec, own, comm.expect
    )
    region = kernels.merge(all_indices, all_values, num_incoming, lo, hi)
    num_senders = None
    if average == "senders":
        num_senders = count_senders(all_indices, all_values, num_incoming, lo, hi)
    return Reduced(
        Sparse(region.indices, region.values, local.numel),
        num_senders,
        local if is_exact(codec) else Sparse(local.indices, torch.cat(decoded), local.numel),
        dense_share,
        local.num - splits[rank],
    )


def _num_per_region(local: Sparse, bounds: list[int]) -> list[int]:
    """How many selected entries lie in each region."""
    inner = to_device(bounds[1:-1], torch.int32, local.indices.device)
    (cuts,) = to_host(torch.searchsorted(local.indices, inner))
    return [end - start for start, end in zip([0, *cuts], [*cuts, local.num], strict=True)]
