# SPDX-License-Identifier: Apache-2.0
"""Fewer points for curves: the records of 100,000 steps as at most a thousand windows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from oktopk.runlog.schema import EpochRecord, ProbeRecord, StepRecord

MAX_POINTS = 1000
FEW_POINTS = 60
"""Windows of a figure that shows medians: a spike is one of many steps in a window."""

Timed = StepRecord | EpochRecord | ProbeRecord
"""Records that belong to a step."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Consecutive records, cut into windows. No window spans two phases."""

    steps: list[int]
    """The last step of each window."""

    slices: list[slice]
    records: Sequence[Timed]

    @property
    def width(self) -> int:
        """Records in the widest window; 1 when every step has a point of its own."""
        return max((part.stop - part.start for part in self.slices), default=1)

    def mean(self, name: str) -> list[float | None]:
        """The mean of a field in each window; None where no record has a value."""
        return self.mean_of(getattr(record, name) for record in self.records)

    def mean_of(self, values: Iterable[float | None]) -> list[float | None]:
        """The mean in each window of a value for every record."""
        column = self._column(values)
        found = []
        for part in self.slices:
            known = column[part][~np.isnan(column[part])]
            found.append(float(known.mean()) if len(known) else None)
        return found

    def quantiles(self, name: str, *shares: float) -> list[list[float | None]]:
        """Quantiles of a field in each window, such as the median for 0.5: one list for each."""
        column = self._column(getattr(record, name) for record in self.records)
        found: list[list[float | None]] = [[] for _ in shares]
        for part in self.slices:
            known = column[part][~np.isnan(column[part])]
            for values, share in zip(found, shares, strict=True):
                values.append(float(np.quantile(known, share)) if len(known) else None)
        return found

    def median(self, name: str) -> list[float | None]:
        """The median of a field in each window; None where no record has a value."""
        return self.quantiles(name, 0.5)[0]

    def cumulative(self, name: str) -> list[float]:
        """The sum of a field up to the end of each window; a missing value counts as 0."""
        sums = np.cumsum(np.nan_to_num(self._column(getattr(r, name) for r in self.records)))
        return [float(sums[part.stop - 1]) for part in self.slices]

    def _column(self, values: Iterable[float | None]) -> np.ndarray:
        numbers = (np.nan if value is None else value for value in values)
        return np.fromiter(numbers, dtype=np.float64, count=len(self.records))


def downsample(records: Sequence[Timed], max_points: int = MAX_POINTS) -> Windows:
    """Cut records into windows of equal width, and also where the phase changes."""
    width = max(1, -(-len(records) // max_points))
    slices, start = [], 0
    for i in range(1, len(records) + 1):
        ends = i == len(records) or _phase(records[i]) != _phase(records[i - 1])
        if ends or i - start == width:
            slices.append(slice(start, i))
            start = i
    return Windows([records[part.stop - 1].step for part in slices], slices, records)


def _phase(record: Timed) -> str:
    return record.phase if isinstance(record, StepRecord) else ""
