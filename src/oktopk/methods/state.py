"""What a method keeps between steps beside the residual. Only `oktopk` uses it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from oktopk.sparse import Room
from oktopk.wire.codec import Form

FLATTEST, STEEPEST = 0.5, 64.0


@dataclass(frozen=True, slots=True)
class Level:
    """A threshold that about k entries reach, and how fast the count falls when it rises.

    Near the threshold the count behaves as threshold ** -slope: 2 for heavy tails, 4 for Laplace,
    6 for Gaussian gradients at 2 %.
    """

    threshold: float
    slope: float = 4.0

    def at(self, ratio: float) -> float:
        """The threshold that `ratio * k` entries should reach."""
        return self.threshold * ratio ** (-1 / self.slope)

    def scaled(self, factor: float) -> Level:
        """The level when everything is `factor` times as large."""
        return Level(self.threshold * factor, self.slope)

    def moved(self, threshold: float, ratio: float) -> Level:
        """The level after `ratio * k` entries were seen to reach `threshold`."""
        return Level(threshold * ratio ** (1 / self.slope), self.slope)


def slope_between(low: float, count_low: int, high: float, count_high: int) -> float | None:
    """The slope seen between two thresholds; None where they tell nothing."""
    if not (0 < low < high and 0 < count_high < count_low):
        return None
    slope = math.log(count_low / count_high) / math.log(high / low)
    return min(max(slope, FLATTEST), STEEPEST)


@dataclass(slots=True)
class State:
    """Thresholds, region bounds and the count of sparse steps."""

    exact_every: int = 32
    """Steps between exact thresholds (tau' of the paper)."""

    bounds_every: int = 64
    """Steps between agreements on the region bounds (tau of the paper)."""

    wire: Form = "plain"
    """How entries travel."""

    step: int = 0
    """Sparse steps finished."""

    local: Level | None = None
    """This rank's level; the other ranks have their own."""

    result: Level | None = None
    """The level of the summed values, the same on every rank."""

    bounds: list[int] | None = None
    """The P+1 cut points of the regions, the same on every rank."""

    uneven: bool = False
    """The last step's shares were so uneven that the bounds should be agreed on again."""

    one_owner: bool = False
    """Agreed bounds once forced a cut of the result; from then on one rank owns everything."""

    room: Room | None = None
    """Memory for candidates, used again at every step. Says nothing, so it is not saved."""

    def shared(self) -> str:
        """What must be the same on every rank, as text to compare."""
        return repr((self.step, self.result, self.bounds, self.uneven, self.one_owner))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists only, so that safe loading and JSON take it."""
        return {
            "step": self.step,
            "local": _pair(self.local),
            "result": _pair(self.result),
            "bounds": None if self.bounds is None else list(self.bounds),
            "uneven": self.uneven,
            "one_owner": self.one_owner,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.local = None if state["local"] is None else Level(*state["local"])
        self.result = None if state["result"] is None else Level(*state["result"])
        self.bounds = None if state["bounds"] is None else list(state["bounds"])
        self.uneven, self.one_owner = state["uneven"], state["one_owner"]


def _pair(level: Level | None) -> list[float] | None:
    return None if level is None else [level.threshold, level.slope]
