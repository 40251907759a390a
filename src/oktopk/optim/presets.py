# SPDX-License-Identifier: Apache-2.0
"""Presets: settings that keep the accuracy, by optimizer. docs/experiments.md has measurements.

Error feedback loses nothing, but it delivers late. How much that costs, and what helps, depends on
what the optimizer does with a sum that arrives late and large.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import SGD, Adamax

from oktopk.optim.adam_state import KNOWN, is_pair_of_betas
from oktopk.optim.residual_scaling import local_optimizer
from oktopk.settings import Settings, ramp
from oktopk.utils.arguments import integer

log = logging.getLogger("oktopk")

RAMP = 2  # ramp steps for every warm-up step


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What suits an optimizer, and why. The fields are those of `Settings`."""

    why: str
    overshoot: float = 0.0
    staleness_correction: bool = False
    rescale_with_lr: bool = False


FIELDS = ("overshoot", "staleness_correction", "rescale_with_lr")

ADAM = Preset(why="a late sum is many gradients, not a huge one", staleness_correction=True)
MOMENTUM = Preset(
    why="what follows a late sum mostly goes the same way", overshoot=0.3, rescale_with_lr=True
)
DESCENT = Preset(why="SGD without momentum takes late sums as they are", rescale_with_lr=True)
QUANTISED = Preset(why="its second moments are quantised and cannot be corrected")
OTHER = Preset(why="it is neither SGD nor known to keep Adam's moments")
NONE = (QUANTISED, OTHER)
"""Presets that set nothing: rank 0 warns, since the run may learn worse than it could."""

NOT_DONE = {
    "staleness_correction": "its moments take a late sum as one gradient",
    "rescale_with_lr": "residuals are not scaled with the learning rate",
}
"""What plain error feedback leaves undone, for optimizers without a preset."""

LOW_BITS = ("8bit", "4bit", "fp8")
"""In the names of classes that quantise their state, with or without an underscore."""


def preset_for(optimizer: Any) -> Preset:
    """The preset of an optimizer, by what its parameter groups contain.

    All ranks must get the same one, so it does not depend on the optimizer's state: that is empty
    before the first step, and differs between ranks if the optimizer is sharded.
    `StalenessCorrection` checks the state later.
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


def apply_preset(
    settings: Settings, optimizer: Any, chosen: Mapping[str, Any], *, logs: bool
) -> Settings:
    """The settings with the preset of the optimizer, except for fields that the user has `chosen`.

    `logs` is whether this rank logs the outcome for all of them.
    """
    if settings.method == "dense" or optimizer is None:
        return settings
    preset = preset_for(optimizer)
    picked = {name: getattr(preset, name) for name in FIELDS if name not in chosen}
    settings = replace(settings, **picked)
    if logs and settings.density < 1:
        level = logging.WARNING if preset in NONE else logging.INFO
        log.log(level, "%s", _described(optimizer, settings, preset))
    return settings


def schedule_after_warmup(
    settings: Settings, optimizer: Any, ramp_steps: int | None
) -> tuple[tuple[int, float], ...]:
    """The density falls from 25 % over `ramp_steps`: by default twice the warm-up, if there is an
    optimizer whose moments need the time."""
    if ramp_steps is None:
        ramp_steps = RAMP * settings.warmup_steps if optimizer is not None else 0
    ramp_steps = integer("ramp_steps", ramp_steps, least=0)
    return () if settings.method == "dense" else ramp(ramp_steps, settings.density)


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


def _described(optimizer: Any, settings: Settings, preset: Preset) -> str:
    """One line for the log: what is set for this optimizer, why, and how the density falls."""
    plain = Preset(why="")
    differs = {
        name: value for name in FIELDS if (value := getattr(settings, name)) != getattr(plain, name)
    }
    if settings.max_beta1 is not None:
        differs["max_beta1"] = settings.max_beta1
    what = ", ".join(f"{name}={value}" for name, value in differs.items()) or "plain error feedback"
    as_preset = settings.max_beta1 is None and all(
        getattr(settings, name) == getattr(preset, name) for name in FIELDS
    )
    because = preset.why if as_preset else "as asked"
    if preset in NONE:
        undone = [text for name, text in NOT_DONE.items() if name not in differs]
        because = ": ".join(filter(None, [preset.why, ", ".join(undone)]))
    falls = f"density {settings.density:g} after {settings.warmup_steps} dense steps"
    if settings.schedule:
        falls += f" and {settings.falling_steps} in which it comes down from 25 %"
    local = type(local_optimizer(optimizer)).__name__
    outer = type(optimizer).__name__
    name = local if local == outer else f"{local} in {outer}"
    return f"for {name}: {what} ({because}); {falls}"
