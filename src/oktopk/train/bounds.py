# SPDX-License-Identifier: Apache-2.0
"""The range of each number in a config.

A number outside of its range is refused before anything starts: it would fail later, or never end.
"""

from __future__ import annotations

import math
from typing import Any

from oktopk.utils.files import single_line
from oktopk.utils.flags import MOST_SECONDS, MOST_WORKERS

MANY = 10**8 - 1
MANY_STEPS = "checkpoints number their steps with 8 digits"
MANY_EXAMPLES = "more examples than fit a step"

RANGES: dict[str, tuple[float, float, str]] = {
    "workers": (1, MOST_WORKERS, "more processes than one machine runs"),
    "seed": (0, 2**63 - 1, "seeds have 63 bits"),
    "timeout": (1.0, MOST_SECONDS, "more than a week"),
    "epochs": (1, 10**6, "more epochs than any run takes"),
    "max_steps": (0, MANY, MANY_STEPS),
    "max_minutes": (0.0, 1e6, "two years"),
    "batch": (1, 65_536, MANY_EXAMPLES),
    "accumulate": (1, 65_536, MANY_EXAMPLES),
    "lr": (0.0, 1000.0, "weights would overflow in a few steps"),
    "lr_decay": (1.0, 10.0, "the learning rate would be 0 after a few epochs"),
    "lr_warmup": (0, MANY, MANY_STEPS),
    "lr_final": (0.0, 1.0, "it is a fraction"),
    "lr_steps": (0, MANY, MANY_STEPS),
    "momentum": (0.0, 1.0, "gradients would add up without end"),
    "beta2": (0.0, 1.0, "moments would never change"),
    "weight_decay": (0.0, 1000.0, "weights would overflow in a few steps"),
    "clip_before": (0.0, 1e30, "0 switches clipping off"),
    "clip_after": (0.0, 1e30, "0 switches clipping off"),
    "density": (0.0, 1.0, "it is a fraction"),
    "warmup_steps": (0, MANY, MANY_STEPS),
    "ramp_steps": (0, MANY, MANY_STEPS),
    "every": (1, MANY, MANY_STEPS),
    "delay": (0, MANY, MANY_STEPS),
    "fragments": (1, MANY, MANY_STEPS),
    "exact_every": (1, MANY, MANY_STEPS),
    "bounds_every": (1, MANY, MANY_STEPS),
    "group_numel": (1, 2**62, "more entries than any model has"),
    "validate_every": (1, 10**6, "more epochs than any run takes"),
    "validate_steps": (0, MANY, MANY_STEPS),
    "validate_batch": (1, 65_536, MANY_EXAMPLES),
    "samples": (0, 10_000, "more than anybody reads"),
    "log_every": (1, MANY, MANY_STEPS),
    "probe_every": (0, MANY, MANY_STEPS),
    "histogram_every": (0, MANY, MANY_STEPS),
    "checkpoint_every": (0, MANY, MANY_STEPS),
    "keep": (1, 10_000, "more than a disk holds"),
}
SMALLEST_RATE = 1e-300
"""Smallest factor that lr_decay may reach in the last epoch."""
LONGEST_NAME = 100
"""Most bytes of a run's name: file names with suffixes must stay below 255."""
LONGEST_PATH = 4096


def check_type(name: str, value: Any, kind: type, *, or_auto: bool = False) -> None:
    """ValueError if a value has another type, is not finite, or is text that no path may have."""
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        wanted = f"{TYPE_NAMES[kind]}{' or auto' * or_auto}"
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if isinstance(value, str):
        _check_text(name, value)


def _check_text(name: str, value: str) -> None:
    """Check text, which is used in file names and config.toml: UTF-8 without control codes."""
    strange = [c for c in value if ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000]
    if strange:
        raise ValueError(f"{name} has the character {strange[0]!r}, which no path may have here")
    if len(value.encode()) > LONGEST_PATH:
        raise ValueError(f"{name} has more than {LONGEST_PATH} bytes: {shown(value)}")


def shown(value: Any) -> str:
    """A wrong value for an error message, shortened if it is long."""
    if not isinstance(value, str | int | float):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and abs(value) >= 10**50:
        return "a number of more than 50 digits"
    text = single_line(repr(value))
    return text if len(text) <= 80 else f"{text[:80]}..."


TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
