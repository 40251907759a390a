# SPDX-License-Identifier: Apache-2.0
"""`gaussiank`: about the top k, by a threshold from the normal distribution; by all-gather."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.methods import allgather
from oktopk.methods.base import SparseMethod
from oktopk.methods.candidates import Candidates
from oktopk.methods.selection import TOLERANCE, exact_apart, smallest_threshold
from oktopk.methods.state import MethodState, ThresholdEstimate, slope_between
from oktopk.sparse import Sparse, empty

MAX_PASSES = 8


def select(acc: Tensor, k: int, state: MethodState, candidates: Candidates | None) -> Sparse:
    """Select by the threshold that k of n normal values reach, corrected until about k do.

    Gradients have heavier tails than the normal distribution, so the first threshold is off. Each
    correction costs one counting pass. Where no threshold gives about k entries (ties), the exact
    top k is selected.
    """
    if k <= 0:
        return empty(acc.numel(), acc)
    rms = float(torch.linalg.vector_norm(acc, dtype=torch.float64)) / acc.numel() ** 0.5
    quantile = torch.special.ndtri(torch.tensor(1 - k / acc.numel() / 2, dtype=torch.float64))
    estimate, last = ThresholdEstimate(rms * quantile.item()), (0.0, 0)
    for _ in range(MAX_PASSES):
        threshold = max(estimate.threshold, smallest_threshold(acc))
        local, count = kernels.select(acc, threshold, k)
        has_all = threshold == smallest_threshold(acc) and count < k
        if (1 - TOLERANCE) * k <= count <= k or has_all:
            return local
        (low, num_low), (high, num_high) = sorted([last, (threshold, count)])
        slope = slope_between(low, num_low, high, num_high) or estimate.slope
        # aim for the middle of the tolerance below k: entries beyond k would have to be cut off
        ratio = max(count, 1) / k / (1 - TOLERANCE / 2)
        estimate = ThresholdEstimate(threshold, slope).updated(threshold, ratio)
        last = (threshold, count)
    return exact_apart(acc, k, state, candidates)


METHOD = SparseMethod(
    name="gaussiank",
    summary="about top k by a normal quantile, by allgather",
    words="2k'(P-1), k' within 10 % of k",
    cost=allgather.cost,
    select=select,
    exchange=allgather.all_gather,
)
