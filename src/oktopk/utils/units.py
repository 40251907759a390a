# SPDX-License-Identifier: Apache-2.0
"""Format durations, sizes and lists for people to read."""

from __future__ import annotations

from collections.abc import Sequence


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
