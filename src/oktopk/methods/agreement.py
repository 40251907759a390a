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
from oktopk.comm import Comm
from oktopk.methods.balance import affordable, must_balance, within_bound
from oktopk.methods.selection import BAND
from oktopk.methods.state import Level, State, slope_between
from oktopk.sparse import Sparse

DIGIT = 8  # bits found per round
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
    header = torch.tensor([*num_reaching, outside], dtype=torch.int32, device=region.values.device)
    table = comm.all_gather(header, stage="counts")  # a row per rank
    totals = table[:, :RUNGS].sum(0).tolist()
    best = min(range(RUNGS), key=lambda rung: abs(totals[rung] - k))
    slope = slope_between(thresholds[0], totals[0], thresholds[-1], totals[-1]) or level.slope
    if not (1 - BAND) * k <= totals[best] <= (1 + BAND) * k:
        return None
    state.result = Level(thresholds[best], slope).moved(thresholds[best], totals[best] / k)
    return Kept(
        _reaching(region, thresholds[best], num_reaching[best]),
        table[:, best].tolist(),
        table[:, RUNGS].tolist(),
    )


def _exactly(region: Sparse, outside: int, k: int, state: State, comm: Comm) -> Kept:
    """Keep exactly the k largest (fewer if there are fewer); ties go to the lower index."""
    threshold = kth_over_ranks(region.values, k, comm)
    above = ~(region.values.abs() <= threshold)  # so written, a NaN is above
    tied = region.values.abs() == threshold
    header = torch.stack([above.sum(), tied.sum(), above.new_tensor(outside, dtype=torch.int64)])
    table = comm.all_gather(header.int(), stage="counts").tolist()
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
    return Kept(_masked(region, keep), counts, [row[2] for row in table])


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
        digits = (bits >> shift).bitwise_and_((1 << DIGIT) - 1)
        bins = torch.bincount(digits, minlength=1 << DIGIT).int()
        counts = comm.sum_small(bins, stage="threshold").tolist()
        digit, k = _digit_of(counts, k)
        prefix = prefix << DIGIT | digit
        bits = bits[digits == digit]
    found = torch.tensor(prefix, dtype=integer).view(values.dtype).item()
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
    chosen, _ = kernels.select(sparse.values, threshold, num)
    assert chosen.indices is not None
    return Sparse(sparse.indices[chosen.indices], chosen.values, sparse.numel)


def _masked(sparse: Sparse, keep: Tensor) -> Sparse:
    assert sparse.indices is not None
    return Sparse(sparse.indices[keep], sparse.values[keep], sparse.numel)
