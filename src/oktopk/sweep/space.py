# SPDX-License-Identifier: Apache-2.0
"""The search space: ranges of settings, from flags such as `--lr 1e-4:1e-2`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from oktopk.train.config import COMMON, Config
from oktopk.train.option import AUTO


@dataclass(frozen=True, slots=True)
class Range:
    """Values from `low` to `high`, both included. `by_ratio` samples their logarithm."""

    low: float
    high: float
    by_ratio: bool
    whole: bool

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"

    def has(self, value: float | Literal["auto"]) -> bool:
        return value != AUTO and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Searchable:
    """A setting that can be searched. `usual` gives its default range; None: it is not searched."""

    by_ratio: bool
    usual: Callable[[Config], tuple[float, float] | None]
    help: str
    """The default range in words."""


def _if_sparse(low: float, high: float) -> Callable[[Config], tuple[float, float] | None]:
    return lambda config: None if config.method == "dense" else (low, high)


def _warmup_range(config: Config) -> tuple[float, float] | None:
    if config.method == "dense" or config.warmup_steps == AUTO:
        return None
    return 0, max(2 * config.warmup_steps, 64)


SEARCHED: dict[str, Searchable] = {
    "lr": Searchable(
        True, lambda config: (config.lr / 4, config.lr * 4), "a quarter to four times the config's"
    ),
    "density": Searchable(True, _if_sparse(0.005, 0.2), "0.005:0.2"),
    "warmup_steps": Searchable(
        False,
        _warmup_range,
        "0 to twice the config's, if that is a number",
    ),
    "exact_every": Searchable(
        True, lambda config: (8, 128) if config.method == "oktopk" else None, "8:128 for oktopk"
    ),
    "bounds_every": Searchable(True, lambda config: None, "the config's"),
    "ramp_steps": Searchable(False, lambda config: None, "the config's"),
    "weight_decay": Searchable(True, lambda config: None, "the config's"),
}


def add_ranges(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting that can be searched."""
    for name, one in SEARCHED.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="LOW:HIGH",
            default=None,
            help=f"a range to search, or a value; default: {one.help}",
        )


def parse(base: Config, given: dict[str, str | None]) -> tuple[Config, dict[str, Range]]:
    """The config with single values applied, and the ranges. Both ends of a range must be valid."""
    space: dict[str, Range] = {}
    for name, one in SEARCHED.items():
        whole = COMMON[name].metadata["type"] is int
        text = given.get(name)
        if text == AUTO and COMMON[name].metadata["or_auto"]:
            base = replace(base, **{name: AUTO})
            continue
        ends = one.usual(base) if text is None else _ends(name, text, whole)
        if ends is None:
            continue
        least, most = (
            replace(base, **{name: end}) for end in ends
        )  # raises if the value is not valid
        if least == most:
            base = least
        else:
            space[name] = Range(*ends, one.by_ratio, whole)
    _check(space)
    return base, space


def _ends(name: str, text: str, whole: bool) -> tuple[float, float]:
    flag = f"--{name.replace('_', '-')}"
    try:
        ends = [int(part) if whole else float(part) for part in text.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2):
        kind = "whole numbers" if whole else "numbers"
        raise ValueError(f"{flag} {text!r}: a range LOW:HIGH of {kind}, or a single one")
    if ends[0] > ends[-1]:
        raise ValueError(f"{flag} {text}: the lower end comes first")
    return ends[0], ends[-1]


def _check(space: dict[str, Range]) -> None:
    if not space:
        raise ValueError("nothing to search: give at least one range, such as --lr 1e-3:1e-2")
    for name, one in space.items():
        if one.by_ratio and one.low <= 0:
            raise ValueError(f"{name} is searched by ratio: its range {one} must be above 0")
