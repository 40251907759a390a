# SPDX-License-Identifier: Apache-2.0
"""The near-exact top k of `oktopk`: one fused pass instead of a selection from scratch."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.methods.candidates import Candidates
from oktopk.methods.selection import TOLERANCE, smallest_threshold, top_k
from oktopk.methods.state import MethodState, ThresholdEstimate, slope_between
from oktopk.sparse import EntryBuffer, Sparse

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
