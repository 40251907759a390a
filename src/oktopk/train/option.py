# SPDX-License-Identifier: Apache-2.0
"""Settings as fields of dataclasses, with help texts and bounds that are checked when one is made.

`Config` and the options of every task consist of them. An error names the field and its value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, field, fields
from typing import Any

from oktopk.train.bounds import check_type, shown
from oktopk.utils.flags import did_you_mean

Bounds = tuple[float, float, str]
"""The least and the largest value, and why there is a largest."""

AUTO = "auto"
"""The value of a setting that the run chooses itself, by its length or by measuring."""


def option(
    default: Any,
    text: str,
    *choices: str,
    bounds: Bounds | None = None,
    or_auto: type | None = None,
    fixed: bool = False,
    harmless: bool = False,
) -> Any:
    """A field with the help text of its flag.

    The value of one with `or_auto` is `auto` or a number of that type. A `fixed` one cannot change
    when a run is resumed, because the saved weights depend on it. A `harmless` one may change
    without a flag, because the training stays the same.
    """
    if not isinstance(default, bool | int | float | str):
        raise ValueError(
            f"the default of an option must be text, a number, True or False, got {default!r}"
        )
    metadata = {"help": text, "choices": choices or None, "bounds": bounds}
    metadata |= {"type": or_auto or type(default), "or_auto": or_auto is not None}
    return field(default=default, metadata=metadata | {"fixed": fixed, "harmless": harmless})


def specs_of(kind: type) -> dict[str, Field[Any]]:
    """The settings of a dataclass, by name."""
    return {spec.name: spec for spec in fields(kind) if "help" in spec.metadata}


def check_options(settings: Any) -> None:
    """Check type, choices and bounds of every field. ValueError names the first that is wrong."""
    check_types(settings)
    for name, spec in specs_of(type(settings)).items():
        if spec.metadata["bounds"] is not None:
            check_bounds(name, getattr(settings, name), spec.metadata["bounds"])


def check_types(settings: Any) -> None:
    """Check type and choices of every field."""
    for name, spec in specs_of(type(settings)).items():
        value = getattr(settings, name)
        if spec.metadata["or_auto"] and value == AUTO:
            continue
        check_type(name, value, spec.metadata["type"], or_auto=spec.metadata["or_auto"])
        choices = spec.metadata["choices"]
        if choices and value not in choices:
            hint = did_you_mean(str(value), choices)
            raise ValueError(
                f"{name} must be one of {', '.join(choices)}, got {shown(value)}{hint}"
            )


def number_or_auto(kind: type) -> Callable[[str], Any]:
    """What reads a number of this type, or `auto`, from text. ValueError if it is neither."""

    def parse(text: str) -> Any:
        return text if text == AUTO else kind(text)

    # argparse names the type in its message
    parse.__name__ = f"{'whole number' if kind is int else 'number'} or auto"
    return parse


def check_bounds(name: str, value: float, bounds: Bounds) -> None:
    """ValueError if the value is below the least or above the largest."""
    least, most, why = bounds
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {shown(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most:g} ({why}), got {shown(value)}")
