"""Steps as columns, few enough to draw: a run of 100,000 steps and one of 100 make like files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from oktopk.runlog.reader import Entry

MOST = 1000  # points of a curve


@dataclass(frozen=True, slots=True)
class Columns:
    """Windows of steps. A window never spans two phases; its values are means over its steps."""

    steps: list[int]
    """The last step of each window."""

    slices: list[slice]
    entries: list[Entry]

    @property
    def width(self) -> int:
        """Steps of the widest window: 1 when every step is shown."""
        return max((part.stop - part.start for part in self.slices), default=1)

    def mean(self, name: str) -> list[float | None]:
        """A field's means; None where no step of the window has it."""
        return self.means([number(entry, name) for entry in self.entries])

    def means(self, values: Iterable[float]) -> list[float | None]:
        """Means of a value for every step, NaN where it is missing."""
        column = np.fromiter(values, dtype=np.float64, count=len(self.entries))
        found = []
        for part in self.slices:
            known = column[part][~np.isnan(column[part])]
            found.append(float(known.mean()) if len(known) else None)
        return found

    def total(self, values: Iterable[float]) -> list[float]:
        """Sums from the first step to the end of each window; what is missing counts as 0."""
        column = np.nan_to_num(np.fromiter(values, dtype=np.float64, count=len(self.entries)))
        sums = np.cumsum(column)
        return [float(sums[part.stop - 1]) for part in self.slices]


def columns(entries: list[Entry], most: int = MOST) -> Columns:
    """Cut steps into windows of equal width, with a cut at every change of phase."""
    width = max(1, -(-len(entries) // most))
    slices, start = [], 0
    for i in range(1, len(entries) + 1):
        ends = i == len(entries) or phase(entries[i]) != phase(entries[i - 1])
        if ends or i - start == width:
            slices.append(slice(start, i))
            start = i
    steps = [int(entries[part.stop - 1].get("step", part.stop - 1)) for part in slices]
    return Columns(steps, slices, entries)


def phase(entry: Entry) -> str:
    return str(entry.get("phase", ""))


def number(entry: Entry, name: str) -> float:
    """A field as a number; NaN where it is missing or null."""
    value: Any = entry.get(name)
    return float(value) if isinstance(value, int | float) else float("nan")
