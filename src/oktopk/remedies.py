"""What keeps the accuracy, by optimizer: measured in docs/experiments.md.

Error feedback loses nothing, but delivers late. How much that costs, and what helps, depends on
what the optimizer does with a sum that comes late and large.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from oktopk.settings import Settings

RAMP = 2  # ramp steps for every warm-up step


@dataclass(frozen=True, slots=True)
class Remedies:
    """Fields of `Settings` that suit an optimizer, and why."""

    why: str
    fields: dict[str, Any] = field(default_factory=dict)


ADAM = Remedies(
    "a late sum is many gradients, not a huge one, and an average already",
    {"late_moments": True, "beta1": 0.3},
)
MOMENTUM = Remedies("what follows a late sum mostly goes the same way", {"advance": 0.3})
NONE = Remedies("nothing is known that suits it better than plain error feedback")


def remedies_for(optimizer: Optimizer) -> Remedies:
    """What is best for this optimizer at a few percent."""
    if isinstance(optimizer, Adam | AdamW | NAdam | RAdam):
        return ADAM
    if isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups):
        return MOMENTUM
    return NONE


def described(optimizer: Optimizer, settings: Settings, picked: dict[str, Any]) -> str:
    """One line for people: what holds for this optimizer, and why it was picked."""
    holds = {name: getattr(settings, name) for name in ("late_moments", "beta1", "advance")}
    parts = [f"{name}={value}" for name, value in holds.items() if value]
    if settings.schedule:
        parts.append(f"{sum(steps for steps, _ in settings.schedule)} steps to come down")
    why = f" ({remedies_for(optimizer).why})" if picked else ""
    what = ", ".join(parts) or "plain error feedback"
    return f"for {type(optimizer).__name__}: {what}{why}; residuals follow the learning rate"
