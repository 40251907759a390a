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


ELSEWHERE = {
    "workers": "gpus gpu num-gpus nproc nprocs nproc-per-node num-processes np world-size ranks",
    "lr": "learning-rate",
    "max-steps": "steps num-steps total-steps max-iters iterations",
    "runs": "output-dir out-dir log-dir logdir",
    "network": "bandwidth rate link",
    "every": "sync-every inner-steps",
    "ddp-dense": "ddp dense-ddp allreduce all-reduce distributeddataparallel",
    "ddp-fp16": "fp16 ddp-half",
    "ddp-powersgd-r4": "powersgd power-sgd ddp-powersgd",
}
"""What other launchers, trainers and papers call our flags, settings and methods."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is called so elsewhere, or at the most similar one;
    empty when there is neither."""
    asked, names = _plain(name), list(known)
    found = [each for each in names if asked in ELSEWHERE.get(_plain(each), "").split()]
    found += difflib.get_close_matches(name[:LONGEST_COMPARED], names, n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()
