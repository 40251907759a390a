# SPDX-License-Identifier: Apache-2.0
"""Numbers on the command line and their ranges, and hints at mistyped names."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable
from typing import TypeVar


class UsageError(ValueError):
    """A command line that cannot be carried out; the message says what to change."""


Number = TypeVar("Number", int, float)

MOST_WORKERS = 1024
"""The most processes that a command starts on one machine."""
MOST_SECONDS = 7 * 24 * 3600.0
"""The longest time limit, a week. Clocks in network libraries overflow after years."""
LONGEST_COMPARED = 100
"""Characters of a mistyped name that are compared with known names: the time grows by squares."""


def number_in_range(kind: type[Number], least: Number, most: Number) -> Callable[[str], Number]:
    """Return a function for the `type` of a flag: it accepts numbers from `least` to `most`."""

    def convert(text: str) -> Number:
        value = kind(text)
        if not least <= value <= most:  # also when it is not a number
            raise argparse.ArgumentTypeError(f"must be from {least:g} to {most:g}, got {text[:40]}")
        return value

    convert.__name__ = kind.__name__  # argparse names it if the text is not a number
    return convert


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the most similar known name; empty when none is similar."""
    close = difflib.get_close_matches(name[:LONGEST_COMPARED], list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
