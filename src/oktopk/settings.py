# SPDX-License-Identifier: Apache-2.0
"""`Settings`: how a gradient is exchanged. Typed, frozen, and checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

from oktopk.methods import METHODS
from oktopk.methods.base import SHORT_BYTES, Average
from oktopk.utils.arguments import choice, flag, integer, number, short_repr
from oktopk.wire import CodecName

Scope = Literal["model", "bucket"]
GroupNumel = int | Literal["auto"]
OnNonfinite = Literal["skip", "raise", "deliver"]
DEFAULT_GROUP_NUMEL = 2**25
WIRE: CodecName = "int4"
DENSITY = 0.2
"""The default: many entries in few bits learn like dense training in short runs, too, in which
fewer entries in more bits do not (docs/results.md)."""

LOCAL_EVERY, LOCAL_DENSITY = 5, 0.1
"""The defaults of `local_steps`."""

CHOICES = {"wire": CodecName, "scope": Scope, "on_nonfinite": OnNonfinite, "average": Average}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a gradient is exchanged. Every rank must have the same; the first step checks that.

    `attach`, `local_steps` and `Reducer` take these fields as keywords, and `handle.settings` has
    those in effect. A value of the wrong type raises TypeError, one out of range ValueError.
    """

    # what is exchanged, and how

    method: str = "oktopk"
    """A name of `oktopk.METHODS`."""

    scope: Scope = "model"
    """Select the k largest entries of the whole model, or of every bucket by itself."""

    wire: CodecName = WIRE
    """How entries travel: `plain` (64 bits each), or with packed indices and values as `fp32`,
    `bf16`, `fp16`, `int8`, or as a sign and a level in 4 bits (`int4`), 2 (`int2`) or 1 (`sign`).
    What rounding takes off stays in the residual. float64 gradients, and all gradients at density
    1, travel plain."""

    group_numel: GroupNumel = DEFAULT_GROUP_NUMEL
    """Consecutive buckets are exchanged together until they have this many entries (`oktopk`).
    Small groups hide more of the exchange behind backward; large ones need fewer messages. `auto`
    measures both early in the sparse phase, in steps of the training, and keeps what is faster. Two
    runs may then choose differently, and so end with different bits."""

    exact_every: int = 32
    """Steps between exact thresholds over the whole model (`oktopk`; tau' of the paper)."""

    bounds_every: int = 64
    """Steps between updates of the region bounds (`oktopk`; tau of the paper)."""

    short_bytes: int = SHORT_BYTES
    """An exchange takes two rounds instead of four if ranks that send their selections to all
    others send fewer bytes than this (`oktopk`). More pays where messages travel for long; 0 is
    never. The bound on words holds all the same, so it is for few ranks: up to 8 with bf16."""

    average: Average = "all"
    """Divide a sum by the number of `all` ranks, or of the `senders` of that entry. Ranks send
    different entries, so over all ranks most of an average is zeros that nobody measured."""

    decay: float = 1.0
    """Multiply the residual by this before each exchange, in [0, 1]. 1 is plain error feedback, and
    0 forgets what was not sent."""

    on_nonfinite: OnNonfinite = "skip"
    """When a rank has a NaN or Inf, all ranks skip the step (gradients of zero), raise, or deliver
    NaN for a GradScaler to see."""

    # the schedule

    density: float = DENSITY
    """Fraction of the entries that is kept, in (0, 1]."""

    shared_by: int = 1
    """Ranks that share the density: each of them selects 1/shared_by of it. For methods that
    deliver all that any rank has selected; `local_steps` sets it."""

    warmup_steps: int = 0
    """Dense steps before the sparse phase."""

    schedule: tuple[tuple[int, float], ...] = ()
    """(steps, density) pairs that follow the warm-up, before `density` holds for the rest."""

    # what suits the optimizer (`oktopk.optim.presets`)

    overshoot: float = 0.0
    """Deliver this much more of every sum than was accumulated, and take it off the residual. The
    next gradients mostly point in the same direction and would arrive late. 0 is plain error
    feedback. It fades with (1 - density), so that at density 1 nothing is overshot. O(k)."""

    max_beta1: float | None = None
    """Upper limit for Adam's first beta in the sparse phase, for the parameters that travel sparse:
    an accumulated sum is an average already, and a second average over it only delays. None leaves
    beta1 alone. Needs `attach(..., optimizer=...)`."""

    staleness_correction: bool = False
    """Let Adam's second moment treat an entry that accumulated over `age` steps as that many small
    gradients, not as one huge one. Needs `attach(..., optimizer=...)`. One read of n, and one int32
    per entry."""

    rescale_with_lr: bool = False
    """Rescale the residual when the learning rate changes, so that it moves the weights as far as
    it would have. Needs `attach(..., optimizer=...)`, which turns it on for SGD alone: optimizers
    that divide by their own history, or take a sign, are harmed by it."""

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method not in METHODS:
            known = ", ".join(METHODS)
            raise ValueError(f"unknown method {short_repr(self.method)}; known methods: {known}")
        least = {"warmup_steps": 0, "exact_every": 1, "bounds_every": 1, "short_bytes": 0}
        least["shared_by"] = 1
        if not (isinstance(self.group_numel, str) and self.group_numel == "auto"):
            least["group_numel"] = 1
        for name, lowest in least.items():
            self._set(name, integer(name, getattr(self, name), least=lowest))
        self._set("density", _density(self.density))
        self._set("schedule", _schedule(self.schedule))
        self._set("overshoot", number("overshoot", self.overshoot, "in [0, 1]"))
        if not 0 <= self.overshoot <= 1:
            raise ValueError(f"overshoot must be in [0, 1], got {self.overshoot}")
        self._set("decay", number("decay", self.decay, "in [0, 1]"))
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be in [0, 1], got {self.decay}")
        if self.max_beta1 is not None:
            self._set("max_beta1", number("max_beta1", self.max_beta1, "in [0, 1), or None"))
            if not 0 <= self.max_beta1 < 1:
                raise ValueError(f"max_beta1 must be in [0, 1), or None, got {self.max_beta1}")
        for name in ("staleness_correction", "rescale_with_lr"):
            flag(name, getattr(self, name))
        for name, words in CHOICES.items():
            choice(name, getattr(self, name), get_args(words))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen only for others

    def is_dense(self, step: int) -> bool:
        """Whether a step is exchanged dense: in the warm-up, or with the method `dense`."""
        return step < self.warmup_steps or self.method == "dense"

    @property
    def falling_steps(self) -> int:
        """Sparse steps before `density` holds: those of the schedule."""
        return sum(steps for steps, _ in self.schedule)

    def overshoot_at(self, step: int) -> float:
        """The overshoot of a sparse step."""
        return self.overshoot * (1 - self.density_at(step))

    def density_at(self, step: int) -> float:
        """The density of a sparse step."""
        ends = accumulate(steps for steps, _ in self.schedule)
        for end, (_, density) in zip(ends, self.schedule, strict=True):
            if step - self.warmup_steps < end:
                return density
        return self.density

    def rank_density(self, density: float) -> float:
        """The fraction that one rank selects, of the density that all ranks share.

        At density 1 nothing is selected: the exchange is dense.
        """
        return density if density == 1 else density / self.shared_by


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
        raise TypeError(f"schedule must be {what}, got {short_repr(value)}") from None
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
