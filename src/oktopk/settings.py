"""`Settings`: how a gradient is to be exchanged. Typed, frozen, checked where it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

from oktopk.methods import METHODS
from oktopk.utils.arguments import (
    choice,
    flag,
    integer,
    number,
    shown,
)
from oktopk.wire.codec import Form

Scope = Literal["model", "bucket"]
OnNonfinite = Literal["skip", "raise", "deliver"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What every rank must have alike; the first step checks that they do."""

    method: str = "oktopk"
    """A name of `oktopk.METHODS`."""

    density: float = 0.02
    """Fraction of the entries that is kept, in (0, 1]."""

    warmup_steps: int = 0
    """Dense steps before the sparse phase."""

    schedule: tuple[tuple[int, float], ...] = ()
    """(steps, density) pairs that follow the warm-up, before `density` holds for good."""

    advance: float = 0.0
    """Deliver this much more of every sum than was saved up, and owe it: what comes next mostly
    goes on in the same direction, and would come late. 0 is plain error feedback. It fades with
    (1 - density), so that at density 1 nothing is late and nothing is advanced. O(k)."""

    beta1: float | None = None
    """Cap on Adam's first beta in the sparse phase, for the parameters that travel sparse: what was
    saved up is an average already, and a second one over it only delays. None, the default for
    every optimizer, leaves it alone. Needs `attach(..., optimizer=...)`."""

    late_moments: bool = False
    """Let Adam's second moment take an entry of `age` steps as that many small gradients, not as
    one huge one. Needs `attach(..., optimizer=...)`. One read of n, one int32 per entry."""

    follow_rate: bool = False
    """Scale what is owed when the learning rate changes, so that it moves the weights as it would
    have. Needs `attach(..., optimizer=...)`, which turns it on for SGD alone: optimizers that
    divide by what they have seen, or take a sign of it, are harmed by it."""

    exact_every: int = 32
    """Steps between exact thresholds over the whole model (`oktopk`; tau' of the paper)."""

    bounds_every: int = 64
    """Steps between agreements on the region bounds (`oktopk`; tau of the paper)."""

    wire: Form = "bf16"
    """How entries travel: `plain` (64 bits each), or with packed indices and values as `fp32`,
    `bf16`, `fp16` or `int8`. What rounding takes off stays in the residual. float64 gradients, and
    all at density 1, travel plain."""

    group_numel: int = 2**25
    """Consecutive buckets with at least so many entries are exchanged together (`oktopk`). Small
    groups hide more of the exchange behind backward; large ones have fewer rounds and messages."""

    scope: Scope = "model"
    """Choose the k largest of the whole model, or of every bucket by itself."""

    on_nonfinite: OnNonfinite = "skip"
    """When a rank has a NaN or Inf, all ranks skip the step (zeros), raise, or deliver NaN."""

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHODS:
            known = ", ".join(METHODS)
            raise ValueError(f"unknown method {shown(self.method)}; known methods: {known}")
        least = {"warmup_steps": 0, "exact_every": 1, "bounds_every": 1, "group_numel": 1}
        for name, lowest in least.items():
            self._set(name, integer(name, getattr(self, name), least=lowest))
        self._set("density", _density(self.density))
        self._set("schedule", _schedule(self.schedule))
        self._set("advance", number("advance", self.advance, "in [0, 1]"))
        if not 0 <= self.advance <= 1:
            raise ValueError(f"advance must be in [0, 1], got {self.advance}")
        if self.beta1 is not None:
            self._set("beta1", number("beta1", self.beta1, "in [0, 1), or None"))
            if not 0 <= self.beta1 < 1:
                raise ValueError(f"beta1 must be in [0, 1), or None, got {self.beta1}")
        for name in ("late_moments", "follow_rate"):
            flag(name, getattr(self, name))
        for name, words in {"wire": Form, "scope": Scope, "on_nonfinite": OnNonfinite}.items():
            choice(name, getattr(self, name), get_args(words))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen only for others

    def is_dense(self, step: int) -> bool:
        return step < self.warmup_steps or self.method == "dense"

    @property
    def falling_steps(self) -> int:
        """Sparse steps before `density` holds for good."""
        return sum(steps for steps, _ in self.schedule)

    def advance_at(self, step: int) -> float:
        """The advance of a sparse step."""
        return self.advance * (1 - self.density_at(step))

    def density_at(self, step: int) -> float:
        """The density of a sparse step."""
        ends = accumulate(steps for steps, _ in self.schedule)
        for end, (_, density) in zip(ends, self.schedule, strict=True):
            if step - self.warmup_steps < end:
                return density
        return self.density


def _density(value: Any) -> float:
    density = number("density", value, "in (0, 1]")
    if not 0 < density <= 1:  # a NaN fails too
        raise ValueError(f"density must be in (0, 1], got {density}")
    return density


def _schedule(value: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(steps, density) for steps, density in value]
    except (TypeError, ValueError):
        what = "(steps, density) pairs"
        raise TypeError(f"schedule must be {what}, got {shown(value)}") from None
    steps = "steps of a part of the schedule"
    return tuple((integer(steps, n, least=1), _density(density)) for n, density in pairs)


def num_kept(numel: int, density: float) -> int:
    """k: the density's share of n, at least one entry of a gradient that has any."""
    return min(numel, max(1, round(density * numel)))


def ramp(steps: int, density: float, start: float = 0.25) -> tuple[tuple[int, float], ...]:
    """A schedule that falls from `start` to `density` over `steps`, by about a third at a time.

    In stairs: whenever k changes, `oktopk` looks at the whole model again.
    """
    if steps < 1 or density >= start:
        return ()
    stairs = min(steps, max(1, round(math.log(start / density) / math.log(1.5))))
    edges = [steps * i // stairs for i in range(stairs + 1)]
    return tuple(
        (end - begin, start * (density / start) ** (i / stairs))
        for i, (begin, end) in enumerate(pairwise(edges))
    )
