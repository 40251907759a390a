"""What keeps the accuracy, by optimizer: measured in docs/experiments.md.

Error feedback loses nothing, but delivers late. How much that costs, and what helps, depends on
what the optimizer does with a sum that comes late and large.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from oktopk.settings import Settings, ramp

log = logging.getLogger("oktopk")

RAMP = 2  # ramp steps for every warm-up step


@dataclass(frozen=True, slots=True)
class Remedies:
    """Fields of `Settings` that suit an optimizer, and why."""

    why: str
    fields: dict[str, Any] = field(default_factory=dict)


ADAM = Remedies(
    "a late sum is many gradients, not a huge one, and an average already",
    {"late_moments": True, "beta1": 0.3, "follow_rate": False},
)
MOMENTUM = Remedies("what follows a late sum mostly goes the same way", {"advance": 0.3})
NONE = Remedies("nothing is known that suits it better than plain error feedback")
PLAIN = {"late_moments": False, "beta1": None, "advance": 0.0, "follow_rate": False}
"""The same fields for plain error feedback."""


def remedies_for(optimizer: Optimizer) -> Remedies:
    """What is best for this optimizer at a few percent."""
    if isinstance(optimizer, Adam | AdamW | NAdam | RAdam):
        return ADAM
    if isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups):
        return MOMENTUM
    return NONE


def suited(
    optimizer: Any,
    settings: Settings,
    ramp_steps: int | None,
    given: Collection[str],
    *,
    tells: bool,
) -> Settings:
    """The settings with what suits the optimizer, but for what was `given` by hand."""
    if ramp_steps is None:
        ramp_steps = RAMP * settings.warmup_steps if optimizer is not None else 0
    if ramp_steps < 0:
        raise ValueError(f"ramp_steps must be 0 or more, got {ramp_steps}")
    if settings.method == "dense":
        return settings
    if "schedule" not in given:
        settings = replace(settings, schedule=ramp(ramp_steps, settings.density))
    if optimizer is None:
        return settings
    remedies = remedies_for(optimizer)
    picked = {name: value for name, value in remedies.fields.items() if name not in given}
    settings = replace(settings, **picked)
    if tells and settings.density < 1:
        log.info("%s", _described(optimizer, settings, remedies))
    return settings


def warn_if_short(settings: Settings, total_steps: int) -> None:
    """Say so when a run ends before it is sparse, or before its density has come down."""
    dense, falling = settings.warmup_steps, settings.falling_steps
    if total_steps <= dense:
        log.warning(
            "the run has %d steps and the warm-up %d: it will never be sparse; lower warmup_steps",
            total_steps,
            dense,
        )
    elif total_steps <= dense + falling:
        log.warning(
            "the run has %d steps, and %d pass before the density is down to %g: lower ramp_steps",
            total_steps,
            dense + falling,
            settings.density,
        )


def _described(optimizer: Optimizer, settings: Settings, remedies: Remedies) -> str:
    """One line for people: what holds for this optimizer, why, and how the density comes down."""
    off = {name: value for name, value in PLAIN.items() if name != "follow_rate"}  # said apart
    holds = {name: getattr(settings, name) for name in off}
    parts = [f"{name}={value}" for name, value in holds.items() if value != off[name]]
    suits = off | remedies.fields
    asked_for = any(getattr(settings, name) != value for name, value in suits.items())
    because = "as asked" if asked_for else remedies.why
    what = ", ".join(parts) or "plain error feedback"
    rate = "; residuals follow the learning rate" if settings.follow_rate else ""
    falls = f"density {settings.density:g} after {settings.warmup_steps} dense steps"
    if settings.schedule:
        falls += f" and {settings.falling_steps} in which it comes down from 25 %"
    return f"for {type(optimizer).__name__}: {what} ({because}){rate}; {falls}"
