# SPDX-License-Identifier: Apache-2.0
"""What a method keeps between steps, beside the residual. Only `oktopk` uses it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from oktopk.methods.cost_model import SHORT_BYTES
from oktopk.sparse import EntryBuffer

MIN_SLOPE, MAX_SLOPE = 0.5, 64.0

Count = Annotated[int, Meta(ge=0, lt=2**62)]
Pair = Annotated[list[float], Meta(min_length=2, max_length=2)]
"""Threshold and slope of an estimate."""


@dataclass(frozen=True, slots=True)
class ThresholdEstimate:
    """A threshold that about k entries reach, and how fast their count falls when it rises.

    Near the threshold the count is modelled as proportional to threshold ** -slope. The slope is
    about 2 for heavy tails, 4 for Laplace and 6 for Gaussian gradients at a density of 2 %.
    """

    threshold: float
    slope: float = 4.0

    def at(self, ratio: float) -> float:
        """The threshold that `ratio * k` entries should reach."""
        return self.threshold * ratio ** (-1 / self.slope)

    def grid(self, num: int, ratio: float) -> list[float]:
        """Ascending thresholds around this one, whose counts should differ by `ratio` each."""
        return [self.at(ratio ** (num / 2 - i)) for i in range(num)]

    def scaled(self, factor: float) -> ThresholdEstimate:
        """The estimate after all entries were multiplied by `factor`."""
        return ThresholdEstimate(self.threshold * factor, self.slope)

    def updated(self, threshold: float, ratio: float) -> ThresholdEstimate:
        """The estimate after `ratio * k` entries were counted to reach `threshold`."""
        return ThresholdEstimate(threshold * ratio ** (1 / self.slope), self.slope)


def slope_between(low: float, count_low: int, high: float, count_high: int) -> float | None:
    """The slope between two thresholds and their counts; None where they do not determine one."""
    if not (0 < low < high and 0 < count_high < count_low):
        return None
    slope = math.log(count_low / count_high) / math.log(high / low)
    return min(max(slope, MIN_SLOPE), MAX_SLOPE)


class SavedThresholds(msgspec.Struct, frozen=True, kw_only=True):
    """A `MethodState` as it is saved."""

    step: Count
    local: Pair | None
    result: Pair | None
    bounds: list[Count] | None
    uneven: bool
    single_owner: bool


@dataclass(slots=True)
class MethodState:
    """Threshold estimates, region bounds and the number of sparse steps."""

    exact_every: int = 32
    """Steps between exact thresholds (tau' of the paper)."""

    bounds_every: int = 64
    """Steps between updates of the region bounds (tau of the paper)."""

    short_bytes: int = SHORT_BYTES
    """Bytes that a rank may send on the short path (`Settings.short_bytes`)."""

    rank: int = 0
    size: int = 1
    """This rank among those that exchange, where it decides which of equal entries it selects."""

    step: int = 0
    """Sparse steps finished."""

    local: ThresholdEstimate | None = None
    """Of this rank's own entries; every rank has another."""

    result: ThresholdEstimate | None = None
    """Of the summed entries, the same on every rank."""

    bounds: list[int] | None = None
    """The P+1 cut points of the regions, the same on every rank."""

    uneven: bool = False
    """Whether the regions of the last step held so different numbers of entries that new bounds
    are due."""

    single_owner: bool = False
    """Whether rank 0 owns the only region, because even regions once forced the result to be cut
    to stay within the bound on words."""

    buffer: EntryBuffer | None = None
    """Memory for candidates, used again in every step. Its content is not part of the state."""

    def ties_from(self, numel: int) -> int:
        """The index at which this rank begins to select among equal magnitudes."""
        return self.rank * numel // self.size

    def shared(self) -> str:
        """What must be the same on every rank, as text to compare."""
        return repr((self.step, self.result, self.bounds, self.uneven, self.single_owner))

    def save(self) -> SavedThresholds:
        """What a resumed run needs."""
        return SavedThresholds(
            step=self.step,
            local=_pair(self.local),
            result=_pair(self.result),
            bounds=None if self.bounds is None else list(self.bounds),
            uneven=self.uneven,
            single_owner=self.single_owner,
        )

    def load(self, saved: SavedThresholds) -> None:
        """Continue from what `save` returned."""
        self.step = saved.step
        self.local = None if saved.local is None else ThresholdEstimate(*saved.local)
        self.result = None if saved.result is None else ThresholdEstimate(*saved.result)
        self.bounds = None if saved.bounds is None else list(saved.bounds)
        self.uneven, self.single_owner = saved.uneven, saved.single_owner


def _pair(estimate: ThresholdEstimate | None) -> list[float] | None:
    return None if estimate is None else [estimate.threshold, estimate.slope]
