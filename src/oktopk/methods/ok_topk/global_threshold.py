# SPDX-License-Identifier: Apache-2.0
"""The global threshold: the ranks agree on it by counting, never by gathering values.

On exact steps the ranks find the k-th largest magnitude of all regions digit by digit: 8 bits per
round, one histogram of 256 bins summed over ranks. Between exact steps one header tells how many
entries reach each of a dozen thresholds around the last one, and the threshold whose count is
nearest k is taken. Either way the count is right in the same step, and a threshold step costs a few
kilobytes instead of a gather of all non-zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.kernels.radix import kth_largest
from oktopk.methods.ok_topk.balance import affordable, must_balance, within_bound
from oktopk.methods.selection import TOLERANCE
from oktopk.methods.state import MethodState, ThresholdEstimate, slope_between
from oktopk.sparse import Sparse
from oktopk.utils.device import to_host

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
