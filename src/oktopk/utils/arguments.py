# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments and flags, and sizes and durations for people to read."""

from __future__ import annotations

import argparse
import difflib
import inspect
import operator
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

# Checks of arguments. Each raises TypeError or ValueError with the argument's name and value.


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


# Numbers on the command line and their ranges, and hints at mistyped names.


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


# Format durations, sizes and lists for people to read.


def format_duration(seconds: float) -> str:
    """Return a duration as `12:34`, or `1:23:45`; below a second as `0.4 s`."""
    if 0 < seconds < 1:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_metric(value: float) -> str:
    """Return a metric or a loss with three decimals; with three digits if it is below 0.1."""
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{value:z.3f}" if value == 0 or abs(value) >= 0.0995 else f"{value:#.3g}"


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes in the largest unit that fits, such as `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def format_rate(bits_per_second: float) -> str:
    """Return a rate with two digits in the largest unit that fits, such as `1.5 Gbit/s`."""
    rate, units = float(f"{bits_per_second:.2g}"), ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"]
    while rate >= 1000 and len(units) > 1:
        rate /= 1000
        units.pop(0)
    return f"{rate:.1f} {units[0]}" if rate < 10 else f"{rate:.0f} {units[0]}"


def list_some(things: Sequence[object], most: int) -> str:
    """Return the first `most` things in a line, and how many more there are."""
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(map(str, things[:most])) + more
