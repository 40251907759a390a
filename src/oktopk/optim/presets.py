# SPDX-License-Identifier: Apache-2.0
"""Presets: settings that keep the accuracy, by optimizer. docs/experiments.md has measurements.

Error feedback loses nothing, but it delivers late. How much that costs, and what helps, depends on
what the optimizer does with a sum that arrives late and large.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.optim import SGD, Adamax

from oktopk.optim.residual_scaling import local_optimizer
from oktopk.optim.staleness import KNOWN, is_pair_of_betas
from oktopk.settings import Settings, ramp
from oktopk.utils.arguments import integer

log = logging.getLogger("oktopk")

WARMUP_STEPS = 128
"""Dense steps at first, unless the user says otherwise."""

WARMUP_SHARE = 0.05
"""Most of a run of known length that the warm-up takes, unless the user says otherwise."""

HIGH_DENSITY = 0.2
"""At this density and above an entry waits for five steps on average or fewer: half of the warm-up
is enough (docs/experiments.md)."""

RAMP = 2
"""Steps in which the density falls for every warm-up step, in a run of unknown length."""

MOST_RAMP = 1024
"""Most steps in which the density falls, unless the user says otherwise. In a run of known length
it falls for half of the steps after the warm-up: a GPT of a few hundred steps learns far more with
that than with a short ramp (docs/experiments.md). In a long run it would be most of the bytes."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What the user has chosen: no optimizer changes it."""

    fields: Mapping[str, Any]
    """Values of `FIELDS`."""

    ramp_steps: int | None = None
    total_steps: int | None = None
    has_schedule: bool = False
    """Whether the densities after the warm-up were given one by one."""


def choices_of(
    ramp_steps: int | None,
    schedule: tuple[tuple[int, float], ...] | None,
    total_steps: int | None,
    **fields: Any,
) -> Choices:
    """The choices among the options of an adapter, where None is no choice."""
    if schedule is not None and ramp_steps is not None:
        raise ValueError("pass schedule or ramp_steps, not both")
    given = {name: value for name, value in fields.items() if value is not None}
    return Choices(
        fields=given,
        ramp_steps=ramp_steps,
        total_steps=total_steps,
        has_schedule=schedule is not None,
    )


def default_warmup(
    warmup_steps: int | None, total_steps: int | None, density: float | Literal["auto"]
) -> int:
    """The dense steps at first: as asked, else 128, but at most 5 % of a run of known length; half
    of that at a high density."""
    if warmup_steps is not None:
        return warmup_steps
    # `auto` may become low; anything else that is not a number is refused by `Settings`
    is_high = isinstance(density, int | float) and density >= HIGH_DENSITY
    part = 0.5 if is_high else 1.0
    if total_steps is None:
        return round(part * WARMUP_STEPS)
    return round(part * min(WARMUP_STEPS, WARMUP_SHARE * total_steps))


def suited(settings: Settings, optimizer: Any, choices: Choices) -> Settings:
    """The settings with the ramp and the preset that suit the optimizer, or None of one."""
    if not choices.has_schedule:
        after_warmup = schedule_after_warmup(settings, optimizer, choices)
        settings = replace(settings, schedule=after_warmup)
    return apply_preset(settings, optimizer, choices.fields)


def apply_preset(settings: Settings, optimizer: Any, chosen: Mapping[str, Any]) -> Settings:
    """The settings with the preset of the optimizer, except for fields that the user has chosen."""
    if settings.method == "dense" or optimizer is None:
        return settings
    preset = preset_for(optimizer)
    picked = {name: getattr(preset, name) for name in FIELDS if name not in chosen}
    return replace(settings, **picked)


def default_ramp(warmup_steps: int, total_steps: int | None) -> int:
    """The steps in which the density falls: half of those after the warm-up, but at most 1024. In a
    run of unknown length, twice the warm-up."""
    if total_steps is None:
        return RAMP * warmup_steps
    return min(MOST_RAMP, max(0, total_steps - warmup_steps) // 2)


def schedule_after_warmup(
    settings: Settings, optimizer: Any, choices: Choices
) -> tuple[tuple[int, float], ...]:
    """The density falls from 25 % over `ramp_steps`; by default only if there is an optimizer,
    whose moments need the time."""
    ramp_steps = choices.ramp_steps
    if ramp_steps is None:
        total = choices.total_steps
        ramp_steps = 0 if optimizer is None else default_ramp(settings.warmup_steps, total)
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


def warn_if_unknown(settings: Settings, optimizer: Any) -> None:
    """Say so when nothing suits the optimizer: the run may learn worse than it could."""
    if settings.method == "dense" or settings.density >= 1 or optimizer is None:
        return
    preset = preset_for(optimizer)
    if preset in NONE:
        undone = [text for name, text in NOT_DONE.items() if not getattr(settings, name)]
        because = ": ".join(filter(None, [preset.why, ", ".join(undone)]))
        what = "; ".join(changes_for(settings)) or PLAIN
        log.warning("for %s: %s (%s)", name_of(optimizer), what, because)


PLAIN = "plain error feedback"


def changes_for(settings: Settings) -> list[str]:
    """What the exchange does for the optimizer, or changes in it, in words."""
    told = {
        "second moments are corrected for gradients that arrive late": (
            settings.staleness_correction
        ),
        f"sums overshoot by {settings.overshoot:.0%}": settings.overshoot > 0,
        "residuals follow the learning rate": settings.rescale_with_lr,
        f"beta1 is at most {settings.max_beta1} in the sparse phase": settings.max_beta1
        is not None,
    }
    return [text for text, holds in told.items() if holds]


def name_of(optimizer: Any) -> str:
    """The class of an optimizer, and of the one that shards it."""
    local, outer = type(local_optimizer(optimizer)).__name__, type(optimizer).__name__
    return local if local == outer else f"{local} in {outer}"
