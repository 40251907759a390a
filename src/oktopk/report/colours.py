# SPDX-License-Identifier: Apache-2.0
"""One colour for one thing, in all figures of a report."""

from __future__ import annotations

from zlib import crc32

BLUE, ORANGE, GREEN, PINK = "#3b82d6", "#e08214", "#2a9d6f", "#c2439a"
VIOLET, BROWN, CYAN, RED = "#8c6bd1", "#b0892b", "#4db6c9", "#d6554c"

THINGS = {
    # the two ways to exchange, and what is compared with them
    "dense": GREEN,
    "sparse": BLUE,
    # who holds something
    "rank 0": ORANGE,
    "result": BLUE,
    "asked": "#9aa4b0",
    "best": VIOLET,
    "recall": PINK,
    # data
    "training": BLUE,
    "validation": ORANGE,
}
PARTS = {
    "data": BROWN,
    "forward": CYAN,
    "backward": "#5b6fa8",
    "exposed": RED,
    "optimizer": "#c9a9d6",
    "select": VIOLET,
    "exchange": PINK,
    "scatter": "#7a5c46",
}
"""The parts of a step."""
STAGES = {
    "dense": GREEN,
    "split": BLUE,
    "gather": ORANGE,
    "threshold": VIOLET,
    "counts": BROWN,
    "bounds": CYAN,
    "reduce": PINK,
    "broadcast": "#6f8f3f",
    "balance": RED,
}
"""The stages of an exchange."""
# for other stages
OTHERS = ("#9aa4b0", "#7a5c46", "#5b6fa8", "#c9a9d6", "#2f6f73", "#d9b44a")


METRICS = (ORANGE, PINK, VIOLET, BROWN)
"""Metrics of the validation: the first has its colour."""


def colour_of_metric(number: int) -> str:
    """The colour of the metric with this number among those that are drawn together."""
    return METRICS[number % len(METRICS)]


def colour_of_stage(stage: str) -> str:
    """The colour of a stage. A hash of the name chooses it for stages without one of their own."""
    return STAGES.get(stage) or OTHERS[crc32(stage.encode()) % len(OTHERS)]


def transparent(colour: str, opacity: float = 0.18) -> str:
    """The colour for an area under a line."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
