"""The global threshold: agreed on by counting, never by gathering the values.

On exact steps the ranks find the k-th largest magnitude of all regions digit by digit: 8 bits a
round, one histogram of 256 bins summed over ranks. Between exact steps one header tells how many
entries reach each of a dozen thresholds around the last one, and the one nearest k is taken. Either
way the count is right in the same step, and a threshold step costs a few kilobytes, not a gather of
all non-zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.methods.ok_topk.balance import affordable, must_balance, within_bound
from oktopk.methods.selection import BAND
from oktopk.methods.state import Level, State, slope_between
from oktopk.sparse import Sparse
from oktopk.utils.device import to_host

DIGIT = 8  # bits found per round
RADIX = 1 << DIGIT
RUNGS = 12
STEP = 1.08  # counts of neighbouring rungs should differ by this factor


@dataclass(frozen=True, slots=True)
class Kept:
    """What this rank keeps of its region, and what everyone knows of everyone."""

    region: Sparse
    counts: list[int]
    """Entries kept by each rank."""

    outside: list[int]
    """Entries each rank has sent in split-and-reduce."""

    balanced: bool = False
    """Whether the shares are to be evened out before they are gathered."""

    cut: bool = False
    """The result had to be cut below 0.9 k to stay within the bound on words."""


def select_globally(region: Sparse, outside: int, k: int, state: State, comm: Comm) -> Kept:
    """Keep the largest sums of all regions, about k together, within the bound on words."""
    kept = None
    if state.result is not None and 0 < k < region.numel and state.step % state.exact_every:
        kept = _by_ladder(region, outside, k, state, comm)
    if kept is None:
        kept = _exactly(region, outside, k, state, comm)
    kept = _with_balance(kept, k)
    if not within_bound(kept.counts, kept.outside, k, balanced=kept.balanced):
        level, most = state.result, affordable(kept.outside, k)
        kept = _with_balance(_exactly(region, outside, most, state, comm), k)
        kept = replace(kept, cut=most < (1 - BAND) * k)
        state.result = level  # the next step starts from the level of k, not of the cut
    return kept


def _with_balance(kept: Kept, k: int) -> Kept:
    return replace(kept, balanced=must_balance(kept.counts, kept.outside, k))


def _by_ladder(region: Sparse, outside: int, k: int, state: State, comm: Comm) -> Kept | None:
    """Take the rung with the count nearest k; None if none is within 10 %."""
    level = state.result
    assert level is not None
    thresholds = [level.at(STEP ** (RUNGS / 2 - rung)) for rung in range(RUNGS)]  # ascending
    num_reaching = kernels.count_reaching(region.values, thresholds)
    header = torch.cat([num_reaching, num_reaching.new_full((1,), outside)])
    table = _rows(comm.all_gather(header, stage="counts"))
    totals = [sum(column) for column in zip(*table, strict=True)]
    best = min(range(RUNGS), key=lambda rung: abs(totals[rung] - k))
    slope = slope_between(thresholds[0], totals[0], thresholds[-1], totals[RUNGS - 1])
    slope = slope or level.slope
    if not (1 - BAND) * k <= totals[best] <= (1 + BAND) * k:
        return None
    state.result = Level(thresholds[best], slope).moved(thresholds[best], totals[best] / k)
    return Kept(
        _reaching(region, thresholds[best], table[comm.rank][best]),
        [row[best] for row in table],
        [row[RUNGS] for row in table],
    )


def _exactly(region: Sparse, outside: int, k: int, state: State, comm: Comm) -> Kept:
    """Keep exactly the k largest (fewer if there are fewer); ties go to the lower index."""
    threshold = kth_over_ranks(region.values, k, comm)
    above = ~(region.values.abs() <= threshold)  # so written, a NaN is above
    tied = region.values.abs() == threshold
    sums = above.sum(), tied.sum()
    header = torch.stack([*sums, torch.full_like(sums[0], outside)])
    table = _rows(comm.all_gather(header.int(), stage="counts"))
    quota = k - sum(num_above for num_above, _, _ in table)
    counts, ties_taken = [], []
    for num_above, num_tied, _ in table:  # rank order is index order
        take = min(num_tied, max(quota, 0))
        quota -= take
        ties_taken.append(take)
        counts.append(num_above + take)
    keep = above | (tied & (tied.cumsum(0) <= ties_taken[comm.rank]))
    slope = state.result.slope if state.result else Level(0.0).slope
    state.result = Level(threshold, slope)
    kept = _masked(region, keep, counts[comm.rank])
    return Kept(kept, counts, [row[2] for row in table])


def kth_over_ranks(values: Tensor, k: int, comm: Comm) -> float:
    """The k-th largest magnitude over all ranks, exactly; 0 if there are fewer.

    A sum of 0 counts: its parts were offered and cancelled, and only as a part of the result do
    they leave the residuals. 4 rounds of 256 int32 for float32 values (8 for float64).
    """
    if k <= 0:
        return math.inf
    integer = torch.int32 if values.dtype == torch.float32 else torch.int64
    bits = values.abs().view(integer)
    shift, prefix = values.dtype.itemsize * 8, 0
    while shift > 0:
        shift -= DIGIT
        digits = bits >> shift
        # what begins with other digits than those found is counted behind the last bin
        last = torch.where(digits >> DIGIT == prefix, digits & (RADIX - 1), RADIX)
        bins = kernels.histogram(last, RADIX + 1)[:RADIX]
        (counts,) = to_host(comm.sum_small(bins, stage="threshold"))
        digit, k = _digit_of(counts, k)
        prefix = prefix << DIGIT | digit
    found = kernels.magnitude(prefix, values.dtype)
    return math.inf if math.isnan(found) else found


def _digit_of(counts: list[int], k: int) -> tuple[int, int]:
    """The digit of the k-th from the top, and its place among those that share it."""
    for digit in range(len(counts) - 1, 0, -1):
        if counts[digit] >= k:
            return digit, k
        k -= counts[digit]
    return 0, k


def _reaching(sparse: Sparse, threshold: float, num: int) -> Sparse:
    assert sparse.indices is not None
    chosen = kernels.take(sparse.values, threshold, num)
    assert chosen.indices is not None
    return Sparse(sparse.indices[chosen.indices], chosen.values, sparse.numel)


def _masked(sparse: Sparse, keep: Tensor, num: int) -> Sparse:
    assert sparse.indices is not None
    where = kernels.places(keep, num)
    return Sparse(sparse.indices[where], sparse.values[where], sparse.numel)


def _rows(table: Tensor) -> list[list[int]]:
    """A row for every rank; the host waits once."""
    return to_host(*table)
