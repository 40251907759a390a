"""What keeps the accuracy, by optimizer: measured in docs/experiments.md.

Error feedback loses nothing, but delivers late. How much that costs, and what helps, depends on
what the optimizer does with a sum that comes late and large.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from torch.optim import SGD, Adamax

from oktopk.optim.adam_state import KNOWN, is_pair_of_betas
from oktopk.optim.residual_scaling import local_optimizer
from oktopk.settings import Settings, ramp
from oktopk.utils.arguments import integer

log = logging.getLogger("oktopk")

RAMP = 2  # ramp steps for every warm-up step


@dataclass(frozen=True, slots=True)
class Remedies:
    """Fields of `Settings` that suit an optimizer, and why."""

    why: str
    fields: dict[str, Any] = field(default_factory=dict)


ADAM = Remedies("a late sum is many gradients, not a huge one", {"late_moments": True})
MOMENTUM = Remedies(
    "what follows a late sum mostly goes the same way", {"advance": 0.3, "follow_rate": True}
)
DESCENT = Remedies("SGD without momentum takes late sums as they are", {"follow_rate": True})
QUANTISED = Remedies("its second moments are quantised and cannot be corrected")
OTHER = Remedies("it is neither SGD nor known to keep Adam's moments")
PLAIN = {"late_moments": False, "beta1": None, "advance": 0.0, "follow_rate": False}
"""The same fields for plain error feedback."""

NOT_DONE = {
    "late_moments": "its moments take a late sum as one gradient",
    "follow_rate": "residuals are not scaled with the learning rate",
}
"""What `PLAIN` leaves undone, for optimizers that have no preset."""

LOW_BITS = ("8bit", "4bit", "fp8")
"""In the names of classes that quantise their state, with or without an underscore."""


def remedies_for(optimizer: Any) -> Remedies:
    """What is best for this optimizer at a few percent, by what its parameter groups have.

    All ranks must come to the same, so it does not depend on the state: that is empty before the
    first step, and of a sharded optimizer every rank has another. `LateMoments` looks at it later.
    """
    local = local_optimizer(optimizer)
    groups = local.param_groups
    if _has_adams_groups(local):
        name = type(local).__name__.lower().replace("_", "")
        return QUANTISED if any(bits in name for bits in LOW_BITS) else ADAM
    if isinstance(local, SGD) or all(map(_has_sgds_keys, groups)):
        return MOMENTUM if any(group["momentum"] for group in groups) else DESCENT
    return OTHER


def _has_adams_groups(optimizer: Any) -> bool:
    """Two betas and an eps to divide by. Lion has no eps, or 0; Adamax divides by a maximum."""
    if isinstance(optimizer, KNOWN):
        return True
    if isinstance(optimizer, Adamax) or not hasattr(optimizer, "register_step_pre_hook"):
        return False
    return all(
        is_pair_of_betas(group) and isinstance(group.get("eps"), float) and group["eps"] > 0
        for group in optimizer.param_groups
    )


def _has_sgds_keys(group: dict[str, Any]) -> bool:
    """Momentum with dampening is SGD's; what normalises its update has an eps, or betas."""
    return {"momentum", "dampening"} <= set(group) and not {"eps", "betas"} & set(group)


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
    ramp_steps = integer("ramp_steps", ramp_steps, least=0)
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
        # without a preset that is no news but a warning: the run may learn worse than it could
        level = logging.INFO if remedies.fields else logging.WARNING
        log.log(level, "%s", _described(optimizer, settings, remedies))
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


def _described(optimizer: Any, settings: Settings, remedies: Remedies) -> str:
    """One line for people: what holds for this optimizer, why, and how the density comes down."""
    holds = {name: getattr(settings, name) for name in PLAIN}
    parts = [f"{name}={value}" for name, value in holds.items() if value != PLAIN[name]]
    what = ", ".join(parts) or "plain error feedback"
    because = remedies.why if holds == PLAIN | remedies.fields else "as asked"
    if not remedies.fields:
        undone = [text for name, text in NOT_DONE.items() if holds[name] == PLAIN[name]]
        because = ": ".join(filter(None, [remedies.why, ", ".join(undone)]))
    falls = f"density {settings.density:g} after {settings.warmup_steps} dense steps"
    if settings.schedule:
        falls += f" and {settings.falling_steps} in which it comes down from 25 %"
    local = type(local_optimizer(optimizer)).__name__
    outer = type(optimizer).__name__
    name = local if local == outer else f"{local} in {outer}"
    return f"for {name}: {what} ({because}); {falls}"
