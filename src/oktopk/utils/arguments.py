"""Arguments of wrong types, refused by name where they are given."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Collection
from numbers import Real
from typing import Any


def shown(value: Any) -> str:
    """A value for an error message: its type where its text would be long."""
    text = reprlib.repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def integer(name: str, value: Any, *, least: int, most: int = 2**62) -> int:
    """A whole number in a range."""
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without data
        raise TypeError(f"{name} must be a whole number, got {shown(value)}") from None
    if not least <= number <= most:
        limit = f"{least} or more" if number < least else f"at most {most}"
        raise ValueError(f"{name} must be {limit}, got {shown(number)}")
    return number


def number(name: str, value: Any, allowed: str) -> float:
    """A number, NaN and Inf among them; `allowed` says which ones will do."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {allowed}, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be {allowed}, got {shown(value)}") from None


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def choice(name: str, value: Any, allowed: Collection[str]) -> str:
    """One of several words."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")
    return value
