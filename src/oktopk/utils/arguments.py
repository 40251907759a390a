# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments. Each raises TypeError or ValueError with the argument's name and value."""

from __future__ import annotations

import inspect
import operator
import reprlib
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any


def short_repr(value: Any) -> str:
    """Return a value as text for an error message; only its type if the text would be long."""
    text = reprlib.repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def chosen(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword-only arguments of a call that are not the defaults of the function."""
    return {
        name: arguments[name]
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and arguments[name] is not parameter.default
    }


def written(arguments: Mapping[str, Any]) -> str:
    """Return keyword arguments as one writes them after others: `, density=0.1, policy=...`.

    What has no short form is left as dots.
    """
    plain = (bool, int, float, str, tuple)
    return "".join(
        f", {name}={value!r}" if isinstance(value, plain) else f", {name}=..."
        for name, value in arguments.items()
    )


def integer(name: str, value: Any, *, least: int, most: int = 2**62) -> int:
    """Return the value as an int if it is a whole number from `least` to `most`."""
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without data
        raise TypeError(f"{name} must be a whole number, got {short_repr(value)}") from None
    if not least <= number <= most:
        limit = f"{least} or more" if number < least else f"at most {most}"
        raise ValueError(f"{name} must be {limit}, got {short_repr(number)}")
    return number


def number(name: str, value: Any, allowed: str) -> float:
    """Return a number as a float, NaN and Inf too; `allowed` describes it in the error."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {allowed}, got {short_repr(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be {allowed}, got {short_repr(value)}") from None


def flag(name: str, value: Any) -> bool:
    """Return the value if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {short_repr(value)}")
    return value


def choice(name: str, value: Any, allowed: Collection[str]) -> str:
    """Return the value if it is one of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {short_repr(value)}")
    return value
