"""Numbers and lists as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def clock(seconds: float) -> str:
    """12:34, or 1:23:45."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(num_bytes: float) -> str:
    """Bytes in the unit a person would take."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def few(things: Sequence[object], most: int) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(map(str, things[:most])) + more
