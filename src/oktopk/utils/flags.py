"""Numbers on the command line, with the range they must be in."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)

MOST_WORKERS = 1024
"""Processes that a command starts on one machine."""
MOST_SECONDS = 7 * 24 * 3600.0
"""A week: nobody waits longer, and clocks of the network libraries overflow beyond years."""


def between(kind: type[Number], least: Number, most: Number) -> Callable[[str], Number]:
    """The `type` of a flag: a number from `least` to `most`."""

    def convert(text: str) -> Number:
        value = kind(text)
        if not least <= value <= most:  # also when it is not a number
            raise argparse.ArgumentTypeError(f"must be from {least:g} to {most:g}, got {text[:40]}")
        return value

    convert.__name__ = kind.__name__  # argparse names it where the text is not a number at all
    return convert
