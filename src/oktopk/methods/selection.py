"""Moves one and two: `residual += grad`, then choose what to offer.

Every selection takes (acc, k, state, candidates) and returns at most k entries. Zeros are never
offered, so there may be fewer; a NaN or Inf always is, if k > 0. Candidates are for methods that
have a scout: they were found in the pass that added the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.methods.state import Level, State, slope_between
from oktopk.sparse import (
    Room,
    Sparse,
    empty,
    first,
    placed,
)

BAND = 0.1  # counts may be this fraction off k
AIM = 1.1  # candidates wanted, in k: enough to hold k when the scale moved a little
ROOM = 2.0  # candidates there is room for, in k


def smallest(values: Tensor) -> float:
    """The least threshold: zeros are nothing to send, and denormals may be flushed to zero."""
    return torch.finfo(values.dtype).smallest_normal


def at_least_smallest(threshold: float, values: Tensor) -> float:
    """A k-th magnitude as a threshold. NaN is the largest magnitude: nothing else passes it."""
    return math.inf if math.isnan(threshold) else max(threshold, smallest(values))


def top(sparse: Sparse, k: int) -> tuple[Sparse, float]:
    """The k largest magnitudes of a selection, and the k-th of them. Ties go to the lower index."""
    assert sparse.indices is not None
    if k <= 0:
        return empty(sparse.numel, sparse.values), 0.0
    if sparse.num <= k:
        return sparse, kernels.kth_magnitude(sparse.values, sparse.num) if sparse.num else 0.0
    threshold = at_least_smallest(kernels.kth_magnitude(sparse.values, k), sparse.values)
    chosen, count = kernels.select(sparse.values, threshold, sparse.num)
    assert chosen.indices is not None
    kept = Sparse(sparse.indices[chosen.indices.long()], chosen.values, sparse.numel)
    return (kept if count <= k else without_ties(kept, threshold, k)), threshold


def without_ties(sparse: Sparse, threshold: float, k: int) -> Sparse:
    """Drop what is over k of the entries exactly at the threshold, the highest indices first."""
    assert sparse.indices is not None
    tied = sparse.values.abs() == threshold
    num_above = sparse.num - int(tied.sum())
    keep = ~tied | (tied.cumsum(0) <= k - num_above)
    return Sparse(sparse.indices[keep], sparse.values[keep], sparse.numel)


def exact_of(acc: Tensor, k: int) -> tuple[Sparse, float]:
    """The k largest magnitudes of a dense vector, and the k-th. Three passes over n, no sort."""
    if k <= 0:
        return empty(acc.numel(), acc), 0.0
    threshold = at_least_smallest(kernels.kth_magnitude(acc, k), acc)
    local, count = kernels.select(acc, threshold, k)
    if count > k:  # ties: see all of them, keep the first
        local, _ = kernels.select(acc, threshold, count)
        local = without_ties(local, threshold, k)
    return local, threshold


def everything(acc: Tensor, k: int, state: State, found: Candidates | None) -> Sparse:
    """All of acc, for the dense exchange."""
    return Sparse(None, acc, acc.numel())


def exact(acc: Tensor, k: int, state: State, found: Candidates | None) -> Sparse:
    """The exact top k of acc."""
    return exact_of(acc, k)[0]


def gaussian(acc: Tensor, k: int, state: State, found: Candidates | None) -> Sparse:
    """By the threshold that k of n normal values reach, corrected until the count is near k.

    Gradients have heavier tails than that, so the first guess is off; each correction costs one
    counting pass, and where none helps (ties) the exact k-th value decides.
    """
    if k <= 0:
        return empty(acc.numel(), acc)
    rms = float(torch.linalg.vector_norm(acc, dtype=torch.float64)) / acc.numel() ** 0.5
    quantile = torch.special.ndtri(torch.tensor(1 - k / acc.numel() / 2, dtype=torch.float64))
    level, seen = Level(rms * quantile.item()), (0.0, 0)
    for _ in range(8):
        threshold = max(level.threshold, smallest(acc))
        local, count = kernels.select(acc, threshold, k)
        nothing_more = threshold == smallest(acc) and count < k
        if (1 - BAND) * k <= count <= k or nothing_more:
            return local
        (low, num_low), (high, num_high) = sorted([seen, (threshold, count)])
        slope = slope_between(low, num_low, high, num_high) or level.slope
        # aim inside the band, below k: what is over k would have to be cut off
        level = Level(threshold, slope).moved(threshold, max(count, 1) / k / (1 - BAND / 2))
        seen = (threshold, count)
    return exact_of(acc, k)[0]


@dataclass(slots=True)
class Candidates:
    """What reached a threshold somewhat below the one that k entries should reach."""

    low: float
    most: int
    """Entries there is room for."""

    room: Room
    """For indices and values of all parts of acc, one after the other."""

    numel: int = 0
    """Length of the parts seen."""

    num: int = 0
    """Entries found."""

    count: int = 0
    """How many there were, also those without room."""

    def find(self, residual: Tensor, grad: Tensor, acc: Tensor) -> None:
        """`acc = residual + grad`, and what of it reaches the threshold joins the candidates."""
        if not kernels.finds_at_once(acc):  # `search` will: once, not once per bucket
            torch.add(residual, grad, out=acc)
            return
        parts = kernels.spans(acc)
        if len(parts) == 1:
            self._note(*self._found(residual, grad, acc, self._left))
            return
        apart = kernels.side_by_side(
            lambda s: self._found(residual[s], grad[s], acc[s], None), parts
        )
        for sparse, count in apart:
            # no part knows of the others: each may have found as many as there is room for in all
            fitting = first(sparse, self.most - self.num)
            self._note(placed(fitting, self._left, self.numel), count)

    def search(self, acc: Tensor) -> None:
        """Find them in the whole of acc, unless they were found as the gradient was added."""
        if not kernels.finds_at_once(acc):
            found, self.count = kernels.select(acc, self.low, self.most)
            assert found.indices is not None
            self.room, self.num, self.numel = (found.indices, found.values), found.num, found.numel

    @property
    def selection(self) -> Sparse:
        indices, values = self.room
        return Sparse(indices[: self.num], values[: self.num], self.numel)

    @property
    def _left(self) -> Room:
        return self.room[0][self.num :], self.room[1][self.num :]

    def _found(
        self, residual: Tensor, grad: Tensor, acc: Tensor, into: Room | None
    ) -> tuple[Sparse, int]:
        base = 0 if into is None else self.numel
        left = self.most - self.num
        return kernels.accumulate_select(residual, grad, acc, self.low, left, into, base)

    def _note(self, found: Sparse, count: int) -> None:
        self.num, self.numel = self.num + found.num, found.numel
        self.count += count


def scout(acc: Tensor, k: int, state: State) -> Candidates | None:
    """Room for candidates, to be found while the gradient is added; None: look at everything."""
    level = state.local
    if level is None or not 0 < k < acc.numel() or state.step % state.exact_every == 0:
        return None
    most = int(ROOM * k)
    return Candidates(max(level.at(AIM), smallest(acc)), most, _room(state, most, acc))


def _room(state: State, most: int, acc: Tensor) -> Room:
    """The room of the last step, if it is enough: fresh memory costs a fault per page."""
    if not kernels.finds_at_once(acc):  # `Candidates.search` makes its own
        return acc.new_empty(0, dtype=torch.int32), acc.new_empty(0)
    kept, needed = state.room, most + kernels.SLACK
    if kept is None or kept[0].numel() < needed or kept[1].dtype != acc.dtype:
        kept = acc.new_empty(needed, dtype=torch.int32), acc.new_empty(needed)
        state.room = kept
    return kept


def near_exact(acc: Tensor, k: int, state: State, found: Candidates | None) -> Sparse:
    """The top k of acc for the price of one fused pass: last step's threshold finds candidates.

    A threshold a little below the last one gives about 1.1 k candidates in the same pass that adds
    the gradient; they are trimmed to k. Only when the scale jumped so far that there are fewer than
    0.9 k candidates or more than 2 k does a full selection follow, at once. It concerns this rank
    alone: no collective depends on it.
    """
    level = state.local
    if found is not None:
        found.search(acc)
    if found is None or not (1 - BAND) * k <= found.count <= found.most:
        return _exact_level(acc, k, state)
    assert level is not None
    candidates = found.selection
    if found.count <= k:
        state.local = level.moved(found.low, found.count / k)
        return candidates
    local, threshold = kernels.trim(candidates, found.low, k)
    if local.num < (1 - BAND) * k:  # a bin with many of them, as when all are alike
        return _exact_level(acc, k, state)
    slope = slope_between(found.low, found.count, threshold, local.num) or level.slope
    state.local = Level(threshold, slope).moved(threshold, local.num / k)
    return local


def _exact_level(acc: Tensor, k: int, state: State) -> Sparse:
    local, threshold = exact_of(acc, k)
    state.local = Level(threshold, state.local.slope) if state.local else Level(threshold)
    return local
