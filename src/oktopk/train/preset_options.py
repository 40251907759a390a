# SPDX-License-Identifier: Apache-2.0
"""The settings with which a config overrides the optimizer's preset.

A config has them as one text, `"overshoot=0.3,max_beta1=0.3"`, instead of a field for each: what is
not in the text is as the preset says, without a value that stands for "not set".
"""

from __future__ import annotations

import tomllib
from typing import Any

from oktopk.optim.presets import FIELDS, Preset
from oktopk.settings import Settings

NAMES = (*FIELDS, "max_beta1")
FOR_ADAM = ("staleness_correction", "max_beta1")
EXAMPLE = "overshoot=0.3,max_beta1=0.3"

Overrides = dict[str, Any]
"""Fields of `Settings`."""


def parse_overrides(text: str) -> Overrides:
    """The settings in a text of `name=value` pairs. ValueError names what is wrong."""
    overrides: Overrides = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in pair.partition("="))
        if name not in NAMES or not equals:
            raise ValueError(
                f"overrides must be like {EXAMPLE!r} with {', '.join(NAMES)}, got {pair!r}"
            )
        try:
            if name in overrides:
                raise ValueError("it is there twice")
            overrides[name] = tomllib.loads(f"value = {value.lower()}")["value"]
            Settings(**{name: overrides[name]})  # checks the type and the range
        except (tomllib.TOMLDecodeError, TypeError, ValueError) as error:
            raise ValueError(f"overrides: {name}={value}: {error}") from error
    return overrides


def preset_options(preset: str, overrides: str) -> Overrides:
    """Arguments of `attach`: nothing for the optimizer's preset, or all of plain error feedback."""
    plain = Preset(why="")
    options = {name: getattr(plain, name) for name in FIELDS} if preset == "none" else {}
    return options | parse_overrides(overrides)
