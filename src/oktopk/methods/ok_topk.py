# SPDX-License-Identifier: Apache-2.0
"""`oktopk` (Li and Hoefler, PPoPP 2022): split and reduce by region, global threshold,
balanced gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from oktopk import kernels, wire
from oktopk.comm.communicator import Comm, equal_shares
from oktopk.errors import MessageError
from oktopk.methods import allgather
from oktopk.methods.allgather import gather_selections
from oktopk.methods.balance import gather, max_entries, select_globally
from oktopk.methods.base import (
    Average,
    Candidates,
    Cost,
    MethodState,
    SparseMethod,
    SparseSum,
    ThresholdEstimate,
    Work,
    at_indices,
    check_told,
    codec_for,
    correction,
    count_senders,
    divided,
    imbalance,
    slope_between,
)
from oktopk.methods.selection import TOLERANCE, largest_positions, smallest_threshold, top_k
from oktopk.sparse import EntryBuffer, Sparse
from oktopk.utils.device import to_device, to_host
from oktopk.wire import (
    WORD_BYTES,
    CodecName,
    EntryRange,
    is_exact,
    most_words,
    sizes_to_tell,
    told_ranges,
)

# The short path of `oktopk`: two rounds for an exchange so small that rounds are what it costs.
#
# Every rank sends its selection to every rank, sums all of them in rank order and keeps the k
# largest sums. There is no owner of a region, so there are no bounds, no counts to agree on a
# threshold, and no second rounding. It sends P/2 times the bytes of the long path and half of its
# rounds.


def is_short(work: Work) -> bool:
    """Whether an exchange takes the short path: the same answer on every rank.

    It depends on the most that a rank may select, never on what it did select. Its messages must be
    small, and its entries within the bound on words.
    """
    peers = work.size - 1
    most = most_words(EntryRange(work.kept, 0, work.numel), work.codec, work.dtype)
    entries = WORD_BYTES * most * peers
    bound = max_entries(work.kept, work.size) * (WORD_BYTES + work.dtype.itemsize)
    return entries <= bound and entries + work.dense_bytes * peers < work.short_bytes


def exchange_directly(
    local: Sparse,
    dense_part: Tensor,
    k: int,
    codec: CodecName,
    comm: Comm,
    average: Average = "all",
) -> SparseSum:
    """Sum the selections of all ranks and keep the k largest sums, or all if there are fewer.

    All ranks sum the same numbers in the same order, so all of them keep the same bits. Ties go to
    the lower index.
    """
    gathered = gather_selections(local, dense_part, codec, comm, average)
    kept, num_senders = gathered.sums, gathered.num_senders
    if kept.num > k:
        where = largest_positions(kept.values, k)
        kept = Sparse(kept.indices[where], kept.values[where], kept.numel)
        num_senders = None if num_senders is None else num_senders[where]
    return SparseSum(
        divided(kept, num_senders),
        gathered.sent,
        gathered.dense_sum,
        imbalance=imbalance(gathered.counts),
        num_sent=gathered.num_sent,
    )


# Regions: which rank sums which index range, and the split-and-reduce phase built on them.


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
        outgoing[peer], decoded[peer], regions[peer] = wire.write_message(
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
        peer: wire.message_words(ranges[peer], codec, dtype, shares.shape[1]) for peer in comm.peers
    }
    received = comm.exchange(outgoing, sizes, local.values.device, stage="split")
    own = wire.Message(indices[rank], decoded[rank], shares[rank])
    all_indices, all_values, dense_share = wire.read_messages(
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


# The near-exact top k of `oktopk`: one fused pass instead of a selection from scratch.


WANTED = 1.1  # candidates to aim for, in units of k: enough for k when the scale moved a little
CAPACITY = 2.0  # candidates that are stored, in units of k


def propose_candidates(acc: Tensor, k: int, state: MethodState) -> Candidates | None:
    """Ask for about 1.1 k candidates while the gradient is added; None on exact-threshold steps."""
    estimate = state.local
    if estimate is None or not 0 < k < acc.numel() or state.step % state.exact_every == 0:
        return None
    threshold = max(estimate.at(WANTED), smallest_threshold(acc))
    capacity = int(CAPACITY * k)
    return Candidates(threshold, capacity, _buffer(state, capacity, acc))


def _buffer(state: MethodState, capacity: int, acc: Tensor) -> EntryBuffer:
    """The buffer of the last step, if it is large enough: fresh memory costs a fault per page."""
    if not kernels.is_synchronous(acc):  # then `Candidates.find_in` allocates its own
        return acc.new_empty(0, dtype=torch.int32), acc.new_empty(0)
    buffer, needed = state.buffer, capacity + kernels.SPARE_SLOTS
    if buffer is None or buffer[0].numel() < needed or buffer[1].dtype != acc.dtype:
        buffer = acc.new_empty(needed, dtype=torch.int32), acc.new_empty(needed)
        state.buffer = buffer
    return buffer


def near_exact(acc: Tensor, k: int, state: MethodState, candidates: Candidates | None) -> Sparse:
    """Select about the top k at the cost of one fused pass over n.

    A threshold a little below the one of the last step finds about 1.1 k candidates in the same
    pass that adds the gradient; they are trimmed to k. Only when the scale jumped so far that there
    are fewer than 0.9 k candidates or more than 2 k, a selection from scratch follows in the same
    step. That concerns this rank alone: no collective depends on it.
    """
    estimate = state.local
    if candidates is not None:
        candidates.find_in(acc)
    if (
        estimate is None
        or candidates is None
        or not (1 - TOLERANCE) * k <= candidates.num_reaching <= candidates.capacity
    ):
        return _from_scratch(acc, k, state)
    low, num_reaching = candidates.threshold, candidates.num_reaching
    if num_reaching <= k:
        state.local = estimate.updated(low, num_reaching / k)
        return candidates.entries
    local, threshold = kernels.trim(candidates.entries, low, k)
    if local.num < (1 - TOLERANCE) * k:  # many entries share a bin of `trim`, as equal ones do
        return _from_scratch(acc, k, state)
    slope = slope_between(low, num_reaching, threshold, local.num) or estimate.slope
    state.local = ThresholdEstimate(threshold, slope).updated(threshold, local.num / k)
    return local


def _from_scratch(acc: Tensor, k: int, state: MethodState) -> Sparse:
    local, threshold = top_k(acc, k)
    before = state.local
    state.local = (
        ThresholdEstimate(threshold, before.slope) if before else ThresholdEstimate(threshold)
    )
    return local


# `oktopk`: top k by region: split and reduce, global threshold, balanced gather.
#
# Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.


def exchange(
    local: Sparse,
    dense_part: Tensor,
    k: int,
    state: MethodState,
    codec: CodecName,
    comm: Comm,
    average: Average = "all",
) -> SparseSum:
    """Sum the selections of all ranks and keep about k sums. At most 6k(P-1)/P words, whatever P.

    `balance.max_entries` has the exact bound. The largest sums are kept, also where each is then
    divided by the number of its senders: entries that many ranks agree on go first. A small
    exchange takes the short path.
    """
    codec = codec_for(local.values, codec)
    dtype, num_dense = local.values.dtype, dense_part.numel()
    if is_short(Work(local.numel, k, comm.size, codec, dtype, num_dense, state.short_bytes)):
        state.step += 1
        return exchange_directly(local, dense_part, k, codec, comm, average)
    due = state.bounds is None or state.step % state.bounds_every == 0 or state.uneven
    if state.bounds is None or (due and not state.single_owner):
        state.bounds = balanced_bounds(local, comm)
    bounds = state.bounds
    reduced = split_reduce(local, dense_part, bounds, comm, codec, average)
    kept = select_globally(reduced.region, reduced.num_sent, k, state, comm)
    num_senders = reduced.num_senders
    if num_senders is not None:
        num_senders = at_indices(num_senders, reduced.region, kept.region)
    sums = gather(
        divided(kept.region, num_senders),
        kept.counts,
        bounds,
        reduced.dense_share,
        comm,
        codec,
        balanced=kept.balanced,
    )
    state.step += 1
    state.uneven = kept.balanced
    if kept.was_cut:
        state.single_owner = True
        state.bounds = single_owner_bounds(local.numel, comm.size)
    return SparseSum(
        sums.result,
        reduced.sent,
        sums.dense_part[: dense_part.numel()],
        corrections=correction(kept.region, sums.decoded, num_senders, codec),
        imbalance=imbalance(kept.counts),
        num_sent=reduced.num_sent + reduced.dense_share.numel() * (comm.size - 1) + sums.num_sent,
    )


def cost(work: Work) -> Cost:
    """k entries to the owners of their regions, then k sums to everyone; or the short path."""
    if is_short(work):
        return allgather.cost(work)
    sent = 2 * (work.size - 1) / work.size * (work.sparse_bytes(work.kept) + work.dense_bytes)
    return Cost(
        rounds=4 + work.size_rounds,
        bytes=sent,
        sent=sent,
        elements=work.numel,
        entries=4 * work.kept,
    )


METHOD = SparseMethod(
    name="oktopk",
    summary="top k by region: split and reduce, global threshold, balanced gather",
    words="4k(P-1)/P, at most 6k(P-1)/P",
    cost=cost,
    keeps_k=True,
    select=near_exact,
    propose=propose_candidates,
    exchange=exchange,
)
