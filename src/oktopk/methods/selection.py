# SPDX-License-Identifier: Apache-2.0
"""Exact selection of the k largest magnitudes, shared by several methods."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.methods.base import Candidates, MethodState
from oktopk.sparse import Sparse, empty

TOLERANCE = 0.1
"""The number of selected entries may differ from k by this fraction."""


def smallest_threshold(values: Tensor) -> float:
    """Zeros carry nothing, and denormals may be flushed to zero: neither is ever selected."""
    return torch.finfo(values.dtype).smallest_normal


def as_threshold(kth_magnitude: float, values: Tensor) -> float:
    """The threshold for a k-th magnitude. NaN is the largest magnitude: only a NaN reaches it."""
    if math.isnan(kth_magnitude):
        return math.inf
    return max(kth_magnitude, smallest_threshold(values))


def top_entries(sparse: Sparse, k: int) -> Sparse:
    """The k largest magnitudes among selected entries. Ties go to the lower index."""
    if k <= 0:
        return empty(sparse.numel, sparse.values)
    if sparse.num <= k:
        return sparse
    where = largest_positions(sparse.values, k)
    return Sparse(sparse.indices[where], sparse.values[where], sparse.numel)


def largest_positions(values: Tensor, k: int) -> Tensor:
    """Where the k largest of more than k values are, ascending. Ties go to the first.

    A value of 0 counts: it may be a sum that cancelled. The host waits once, for the k-th value.
    """
    if k <= 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    kth = kernels.kth_magnitude(values, k)
    magnitudes, threshold = values.abs(), math.inf if math.isnan(kth) else kth
    above = ~(magnitudes <= threshold)  # written so that a NaN is above
    tied = magnitudes == threshold
    keep = above | (tied & (tied.cumsum(0) <= k - above.sum()))
    # more than k are above the threshold if more than k are NaN
    return kernels.nonzero_counted(keep & (keep.cumsum(0) <= k), k)


def without_ties(sparse: Sparse, threshold: float, k: int, ties_from: int = 0) -> Sparse:
    """Drop entries exactly at the threshold until k are left.

    Those are kept whose indices come first from `ties_from` on; after the last index comes 0.
    """
    tied = sparse.values.abs() == threshold
    num_tied = int(tied.sum())
    before = (tied & (sparse.indices < ties_from)).sum()
    place = (tied.cumsum(0) - 1 - before) % max(num_tied, 1)
    keep = ~tied | (place < k - (sparse.num - num_tied))
    return Sparse(sparse.indices[keep], sparse.values[keep], sparse.numel)


def top_k(acc: Tensor, k: int, ties_from: int = 0) -> tuple[Sparse, float]:
    """The k largest magnitudes of a vector, and their threshold. Three passes over n, no sort.

    Ties go to the first indices from `ties_from` on.
    """
    if k <= 0:
        return empty(acc.numel(), acc), 0.0
    threshold = as_threshold(kernels.kth_magnitude(acc, k), acc)
    local, num_reaching = kernels.select(acc, threshold, k)
    if num_reaching > k:  # ties at the threshold: find all of them, keep the first
        local, _ = kernels.select(acc, threshold, num_reaching)
        local = without_ties(local, threshold, k, ties_from)
    return local, threshold


def exact(acc: Tensor, k: int, state: MethodState, candidates: Candidates | None) -> Sparse:
    """Select the exact top k. Ties go to the lower index.

    For methods that keep k sums: what several ranks select adds up, and is kept.
    """
    return top_k(acc, k)[0]


def exact_apart(acc: Tensor, k: int, state: MethodState, candidates: Candidates | None) -> Sparse:
    """Select the exact top k; ties go to the first indices from a place on that is this rank's own.

    For methods that deliver all that was selected: where many magnitudes are equal, as with the
    moves of Lion or signSGD, ranks that all began at index 0 would select the same entries.
    """
    return top_k(acc, k, state.ties_from(acc.numel()))[0]
