"""`Settings`: how a gradient is to be exchanged. Typed, frozen, checked where it is made."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, get_args

from oktopk.methods import METHODS
from oktopk.wire import Form

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
        for name in ("warmup_steps", "exact_every", "bounds_every", "group_numel"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        object.__setattr__(self, "density", float(self.density))
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}; known methods: {', '.join(METHODS)}")
        for density in (self.density, *(density for _, density in self.schedule)):
            if not 0 < density <= 1:  # a NaN fails too
                raise ValueError(f"density must be in (0, 1], got {density}")
        self._check_numbers()
        if not 0 <= self.advance <= 1:
            raise ValueError(f"advance must be in [0, 1], got {self.advance}")
        if self.beta1 is not None and not 0 <= self.beta1 < 1:
            raise ValueError(f"beta1 must be in [0, 1), or None, got {self.beta1}")
        for name, allowed in {
            "wire": Form,
            "scope": Scope,
            "on_nonfinite": OnNonfinite,
        }.items():
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(
                    f"{name} must be one of {get_args(allowed)}, got {getattr(self, name)!r}"
                )

    def _check_numbers(self) -> None:
        for steps, _ in self.schedule:
            if steps < 1:
                raise ValueError(f"a part of the schedule must last 1 step or more, got {steps}")
        least_of = {"warmup_steps": 0, "exact_every": 1, "bounds_every": 1, "group_numel": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)}")

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
