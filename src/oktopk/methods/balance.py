# SPDX-License-Identifier: Apache-2.0
"""How `oktopk` keeps about k sums within its bound on words: the global threshold, and even
shares.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.kernels.bits import kth_largest
from oktopk.methods.base import MethodState, ThresholdEstimate, slope_between
from oktopk.methods.selection import TOLERANCE
from oktopk.sparse import Sparse
from oktopk.utils.device import to_host
from oktopk.wire import (
    CodecName,
    EntryRange,
    allocate_entries,
    decode,
    encode,
    is_possible,
    is_sized_by_count,
    num_words,
    words_per_value,
)

# Gather the result evenly: who sends how much, planned from the counts alone.
#
# Every rank knows how many sums every rank kept. A rank above its even share hands the surplus
# (the last entries of its region) to ranks below theirs; then all ranks send shares of equal size
# to everyone. Only the surplus moves. The result is in index order, so it is the same with and
# without balancing.


UNEVEN = 4  # the paper's rule: balance when the largest share is over 4 times the mean


def even_shares(total: int, size: int) -> list[int]:
    return [total // size + (rank < total % size) for rank in range(size)]


def surplus_moves(counts: list[int]) -> list[tuple[int, int, int]]:
    """(source, target, entries), ordered by source, then target. O(P)."""
    spare = [
        have - share
        for have, share in zip(counts, even_shares(sum(counts), len(counts)), strict=True)
    ]
    moves, target = [], 0
    for source in range(len(counts)):
        while spare[source] > 0:
            while spare[target] >= 0:
                target += 1
            num = min(spare[source], -spare[target])
            moves.append((source, target, num))
            spare[source] -= num
            spare[target] += num
    return moves


def entries_sent(counts: list[int], *, balanced: bool) -> list[int]:
    """Entries each rank sends to gather `counts`, with or without balance."""
    if not balanced:
        return [count * (len(counts) - 1) for count in counts]
    shares = even_shares(sum(counts), len(counts))
    return [
        max(count - share, 0) + share * (len(counts) - 1)
        for count, share in zip(counts, shares, strict=True)
    ]


def max_entries(k: int, size: int) -> int:
    """The most entries a rank may send in one step: 3k(P-1)/P, that is 6k(P-1)/P words.

    Below k = 2P, k is taken up to the next multiple of P: no share is smaller than an entry.
    """
    if k < 2 * size:
        return 3 * -(-k // size) * (size - 1)
    return 3 * k * (size - 1) // size


def within_bound(counts: list[int], num_sent: list[int], k: int, *, balanced: bool) -> bool:
    """Whether no rank sends more than the bound; `num_sent` is what each has sent before."""
    bound = max_entries(k, len(counts))
    sent = entries_sent(counts, balanced=balanced)
    return all(before + now <= bound for before, now in zip(num_sent, sent, strict=True))


def must_balance(counts: list[int], num_sent: list[int], k: int) -> bool:
    """The paper's rule, or earlier when direct sends would pass the bound.

    The rule is made for recursive doubling. With direct sends a share of twice the mean already
    costs 4k(P-1)/P words.
    """
    uneven = max(counts) * len(counts) > UNEVEN * sum(counts)
    return uneven or not within_bound(counts, num_sent, k, balanced=False)


def affordable(num_sent: list[int], k: int) -> int:
    """The largest result that balance can gather within the bound, wherever its entries lie."""
    size = len(num_sent)
    budget = max_entries(k, size) - max(num_sent)

    def worst(total: int) -> int:  # one rank holds it all
        share = -(-total // size)
        return total - share + share * (size - 1)

    return bisect_right(range(1, k + 1), budget, key=worst)


@dataclass(frozen=True, slots=True)
class Gathered:
    """What every rank has after the gather, with the same bits on each."""

    result: Sparse
    dense_part: Tensor
    """The shares of what travels dense, one after the other."""

    decoded: Tensor
    """The sums of this rank as all ranks read them: rounded where the codec rounds."""

    num_sent: int
    """Entries this rank sent, those that travel dense among them."""


def gather(
    kept: Sparse,
    counts: list[int],
    bounds: list[int],
    dense_share: Tensor,
    comm: Comm,
    codec: CodecName,
    *,
    balanced: bool = False,
) -> Gathered:
    """Send this rank's sums to everyone; return all sums in index order.

    A sum is encoded once, by its owner, and every rank decodes those words, the owner too: so all
    ranks have the same bits. Sends `entries_sent` entries, and the dense share.
    """
    dtype, rank = kept.values.dtype, comm.rank
    for peer, (count, (lo, hi)) in enumerate(zip(counts, pairwise(bounds), strict=True)):
        comm.expect(0 <= count <= hi - lo, peer)
    ranges = _pieces(counts, bounds, surplus_moves(counts) if balanced else [])
    own = {key: piece_range for key, piece_range in ranges.items() if key[0] == rank}
    words, decoded, own = _encoded(kept, own, codec)
    ranges = _with_told_sizes(ranges, own, comm, dense_share, codec)
    if balanced:
        surplus = {target: piece for (_, target), piece in words.items() if target != rank}
        sizes = {
            source: num_words(piece_range, codec, dtype)
            for (source, holder), piece_range in ranges.items()
            if holder == rank != source
        }
        received = comm.exchange(surplus, sizes, dense_share.device, stage="balance")
        words |= {(source, rank): piece for source, piece in received.items()}
    held = [key for key in sorted(ranges) if key[1] == rank]
    block = torch.cat([*(words[key] for key in held), dense_share.contiguous().view(torch.int32)])
    indices, values, dense_part = _read_blocks(block, ranges, dense_share, comm, codec)
    moved = sum(
        piece_range.count
        for (source, holder), piece_range in ranges.items()
        if source == rank != holder
    )
    block_size = sum(ranges[key].count for key in held) + dense_share.numel()
    num_sent = moved + (comm.size - 1) * block_size
    return Gathered(Sparse(indices, values, kept.numel), dense_part, decoded, num_sent)


Piece = tuple[int, int]
"""The owner of a piece of the result, and the rank that sends it to everyone."""


def _pieces(
    counts: list[int], bounds: list[int], moves: list[tuple[int, int, int]]
) -> dict[Piece, EntryRange]:
    """All pieces in index order: what an owner keeps comes before what it hands over."""
    left = list(counts)
    for source, _, num in moves:
        left[source] -= num
    keys = sorted(
        [(rank, -1, rank, num) for rank, num in enumerate(left)]
        + [(source, target, target, num) for source, target, num in moves]
    )
    return {
        (source, holder): EntryRange(num, bounds[source], bounds[source + 1])
        for source, _, holder, num in keys
    }


def _encoded(
    kept: Sparse, own: dict[Piece, EntryRange], codec: CodecName
) -> tuple[dict[Piece, Tensor], Tensor, dict[Piece, EntryRange]]:
    """This rank's pieces: as words, values as the receivers decode them, and what they are told."""
    counts = [piece_range.count for piece_range in own.values()]
    words, decoded, told = {}, [], {}
    for (key, piece_range), indices, values in zip(
        own.items(), kept.indices.split(counts), kept.values.split(counts), strict=True
    ):
        words[key], part, told[key] = encode(indices, values, piece_range, codec)
        decoded.append(part)
    return words, torch.cat(decoded), told


def _with_told_sizes(
    ranges: dict[Piece, EntryRange],
    own: dict[Piece, EntryRange],
    comm: Comm,
    like: Tensor,
    codec: CodecName,
) -> dict[Piece, EntryRange]:
    """All pieces with the sizes of their indices: one more header, unless counts tell the sizes.

    Every rank sends as many sizes as the rank with the most pieces.
    """
    if is_sized_by_count(codec):
        return ranges
    pieces_of = [[key for key in ranges if key[0] == rank] for rank in range(comm.size)]
    most = max(len(pieces) for pieces in pieces_of)
    sizes = [piece_range.num_index_words or 0 for piece_range in own.values()]
    told = comm.all_gather_sizes(sizes + [0] * (most - len(sizes)), like.device, stage="sizes")
    sized = {
        key: replace(ranges[key], num_index_words=told[rank * most + number])
        for rank, pieces in enumerate(pieces_of)
        for number, key in enumerate(pieces)
    }
    for (rank, _), piece_range in sized.items():
        comm.expect(is_possible(piece_range, codec, like.dtype), rank)
    return ranges | sized


def _read_blocks(
    block: Tensor,
    ranges: dict[Piece, EntryRange],
    dense_share: Tensor,
    comm: Comm,
    codec: CodecName,
) -> tuple[Tensor, Tensor, Tensor]:
    """Send this rank's block to all; return the indices, values and dense shares of all blocks."""
    dtype = dense_share.dtype
    held = {rank: [key for key in sorted(ranges) if key[1] == rank] for rank in range(comm.size)}
    widths = {
        rank: [
            *(num_words(ranges[key], codec, dtype) for key in keys),
            dense_share.numel() * words_per_value(dtype),
        ]
        for rank, keys in held.items()
    }
    sizes = {rank: sum(widths[rank]) for rank in comm.peers}
    blocks = comm.exchange(dict.fromkeys(comm.peers, block), sizes, block.device, stage="gather")
    blocks[comm.rank] = block
    indices, index_parts, values, value_parts = allocate_entries(list(ranges.values()), dense_share)
    position = {key: number for number, key in enumerate(ranges)}
    dense_parts = []
    for rank, keys in held.items():
        *pieces, dense_part = blocks[rank].split(widths[rank])
        for key, words in zip(keys, pieces, strict=True):
            number = position[key]
            parts = index_parts[number], value_parts[number]
            is_sound = decode(words, ranges[key], codec, *parts)
            comm.expect(is_sound, key[0] if rank == comm.rank else rank)
        dense_parts.append(dense_part.clone().view(dtype))
    if len(ranges) > comm.size:  # each piece of an owner ascends, but do they one after the other?
        _expect_ascent(indices, ranges, comm)
    return indices, values, torch.cat(dense_parts)


def _expect_ascent(indices: Tensor, ranges: dict[Piece, EntryRange], comm: Comm) -> None:
    """Refuse an owner whose pieces, which went through other ranks, do not ascend together."""
    counts, lo, hi = [0] * comm.size, min(each.lo for each in ranges.values()), 0
    for (owner, _), piece_range in ranges.items():
        counts[owner] += piece_range.count
        hi = max(hi, piece_range.hi)
    for owner, region in enumerate(indices.split(counts)):
        comm.expect(kernels.ascend_within(region, lo, hi), owner)


# The global threshold: the ranks agree on it by counting, never by gathering values.
#
# On exact steps the ranks find the k-th largest magnitude of all regions digit by digit: 8 bits
# per round, one histogram of 256 bins summed over ranks. Between exact steps one header tells how
# many entries reach each of a dozen thresholds around the last one, and the threshold whose count
# is nearest k is taken. Either way the count is right in the same step, and a threshold step costs
# a few kilobytes instead of a gather of all non-zeros.


DIGIT_BITS = 8  # bits of the threshold found per round
GRID_SIZE = 12
GRID_RATIO = 1.08  # expected ratio of the counts of neighbouring thresholds of the grid


@dataclass(frozen=True, slots=True)
class Kept:
    """What this rank keeps of its region, and what every rank knows of every rank."""

    region: Sparse
    counts: list[int]
    """Entries kept by each rank."""

    num_sent: list[int]
    """Entries each rank has sent in split-and-reduce."""

    balanced: bool = False
    """Whether the shares are to be evened out before they are gathered."""

    was_cut: bool = False
    """Whether the result had to be cut below 0.9 k to stay within the bound on words."""


def select_globally(region: Sparse, num_sent: int, k: int, state: MethodState, comm: Comm) -> Kept:
    """Keep the largest sums of all regions, about k together, within the bound on words."""
    kept = None
    if state.result is not None and 0 < k < region.numel and state.step % state.exact_every:
        kept = _by_grid(region, num_sent, k, state, state.result, comm)
    if kept is None:
        kept = _exactly(region, num_sent, k, state, comm)
    kept = _with_balance(kept, k)
    if not within_bound(kept.counts, kept.num_sent, k, balanced=kept.balanced):
        estimate, most = state.result, affordable(kept.num_sent, k)
        kept = _with_balance(_exactly(region, num_sent, most, state, comm), k)
        kept = replace(kept, was_cut=most < (1 - TOLERANCE) * k)
        state.result = estimate  # the next step starts from the threshold of k, not of the cut
    return kept


def _with_balance(kept: Kept, k: int) -> Kept:
    return replace(kept, balanced=must_balance(kept.counts, kept.num_sent, k))


def _by_grid(
    region: Sparse,
    num_sent: int,
    k: int,
    state: MethodState,
    estimate: ThresholdEstimate,
    comm: Comm,
) -> Kept | None:
    """Take the threshold of the grid whose count is nearest k; None if none is within 10 %."""
    thresholds = estimate.grid(GRID_SIZE, GRID_RATIO)
    num_reaching = kernels.count_at_least(region.values, thresholds)
    header = torch.cat([num_reaching, num_reaching.new_full((1,), num_sent)])
    table = to_host(*comm.all_gather_header(header, stage="counts"))
    totals = [sum(column) for column in zip(*table, strict=True)]
    best = min(range(GRID_SIZE), key=lambda i: abs(totals[i] - k))
    if not (1 - TOLERANCE) * k <= totals[best] <= (1 + TOLERANCE) * k:
        return None
    slope = slope_between(thresholds[0], totals[0], thresholds[-1], totals[GRID_SIZE - 1])
    found = ThresholdEstimate(thresholds[best], slope or estimate.slope)
    state.result = found.updated(thresholds[best], totals[best] / k)
    return Kept(
        _reaching(region, thresholds[best], table[comm.rank][best]),
        [row[best] for row in table],
        [row[GRID_SIZE] for row in table],
    )


def _exactly(region: Sparse, num_sent: int, k: int, state: MethodState, comm: Comm) -> Kept:
    """Keep exactly the k largest (fewer if there are fewer); ties go to the lower index."""
    threshold = kth_over_ranks(region.values, k, comm)
    above = ~(region.values.abs() <= threshold)  # written so that a NaN is above
    tied = region.values.abs() == threshold
    sums = above.sum(), tied.sum()
    header = torch.stack([*sums, torch.full_like(sums[0], num_sent)])
    table = to_host(*comm.all_gather_header(header.int(), stage="counts"))
    left = k - sum(num_above for num_above, _, _ in table)
    counts, ties_kept = [], []
    for num_above, num_tied, _ in table:  # rank order is index order
        num_ties = min(num_tied, max(left, 0))
        left -= num_ties
        ties_kept.append(num_ties)
        counts.append(num_above + num_ties)
    keep = above | (tied & (tied.cumsum(0) <= ties_kept[comm.rank]))
    slope = state.result.slope if state.result else ThresholdEstimate(0.0).slope
    state.result = ThresholdEstimate(threshold, slope)
    kept = _masked(region, keep, counts[comm.rank])
    return Kept(kept, counts, [row[2] for row in table])


def kth_over_ranks(values: Tensor, k: int, comm: Comm) -> float:
    """The k-th largest magnitude over all ranks, exactly; 0 if there are fewer.

    A sum of 0 counts: its parts were sent and cancelled, and they leave the residuals only as a
    part of the result. 4 rounds of 256 int32 for float32 values (8 for float64).
    """
    if k <= 0:
        return math.inf
    integer = torch.int32 if values.dtype == torch.float32 else torch.int64
    bits = values.abs().view(integer)

    def count_digits(prefix: int, shift: int, digit_bits: int) -> list[int]:
        radix = 1 << digit_bits
        digits = bits >> shift
        # values that begin with other digits than those found are counted in one more bin
        last = torch.where(digits >> digit_bits == prefix, digits & (radix - 1), radix)
        bins = kernels.histogram(last, radix + 1)[:radix]
        return to_host(comm.all_reduce_header(bins, stage="threshold"))[0]

    kth = kth_largest(k, values.dtype.itemsize * 8, DIGIT_BITS, count_digits)
    found = kernels.from_bits(kth, values.dtype)
    return math.inf if math.isnan(found) else found


def _reaching(sparse: Sparse, threshold: float, num: int) -> Sparse:
    chosen = kernels.select_counted(sparse.values, threshold, num)
    return Sparse(sparse.indices[chosen.indices], chosen.values, sparse.numel)


def _masked(sparse: Sparse, keep: Tensor, num: int) -> Sparse:
    where = kernels.nonzero_counted(keep, num)
    return Sparse(sparse.indices[where], sparse.values[where], sparse.numel)
