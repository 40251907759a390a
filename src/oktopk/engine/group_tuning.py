# SPDX-License-Identifier: Apache-2.0
"""`GroupTuning`: chooses the size of groups of buckets by measuring (`group_numel="auto"`).

Small groups leave while backward continues, so their exchange is hidden; large ones need fewer
messages. Which is faster depends on network, model and machine. So early in the sparse phase the
model is exchanged in one, two and four groups for a few steps each. Which groups a step has follows
from its number alone, so all ranks have the same. After the last trial the ranks add up their
times, and all of them keep the grouping that was fastest.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import msgspec

from oktopk.engine.buckets import Bucket, grouped
from oktopk.methods.state import Count

NUM_GROUPS = (1, 2, 4)
"""Numbers of groups that are tried, as far as the buckets allow."""

FIRST_STEPS = 17
"""Sparse steps before the first trial: earlier ones set quotas often, and thresholds settle."""

TRIAL_STEPS = 8
"""Steps of a trial."""

SETTLING_STEPS = 3
"""First steps of a trial, which are not measured: one sets quotas, others find thresholds."""


class SavedTuning(msgspec.Struct, frozen=True, kw_only=True):
    """A `GroupTuning` as it is saved."""

    start: Count
    choices: list[Count]
    times: list[list[Count]]
    chosen: Count | None


@dataclass(slots=True)
class GroupTuning:
    """The trials of one model: what is tried, what it took, and what was chosen."""

    start: int = 0
    """The step in which the first trial begins."""

    choices: list[int] = field(default_factory=list)
    """Sizes of groups that are tried, one after the other; empty until the trials are planned."""

    times: list[list[int]] = field(default_factory=list)
    """Microseconds of the measured steps of each trial on this rank."""

    chosen: int | None = None
    """The size of groups that was kept; None before that is decided."""

    def plan(self, start: int, buckets: list[Bucket]) -> None:
        """Begin the trials at step `start`; if there is only one choice, it is made."""
        self.start, self.choices = start, distinct_choices(buckets)
        self.times = [[] for _ in self.choices]
        if len(self.choices) == 1:
            self.chosen = self.choices[0]

    def group_numel_at(self, step: int, before: int) -> int:
        """The size of groups in a step; `before` the trials it is the given one."""
        if self.chosen is not None:
            return self.chosen
        if not self.choices or step < self.start:
            return before
        return self.choices[min((step - self.start) // TRIAL_STEPS, len(self.choices) - 1)]

    def trial(self, step: int) -> int | None:
        """The number of the trial that a step belongs to; None if it belongs to none."""
        if self.chosen is not None or not self.choices or step < self.start:
            return None
        number = (step - self.start) // TRIAL_STEPS
        return number if number < len(self.choices) else None

    def is_due(self, step: int) -> bool:
        """Whether all ranks choose before this step."""
        end = self.start + TRIAL_STEPS * len(self.choices)
        return self.chosen is None and bool(self.choices) and step >= end

    def record(self, step: int, seconds: float) -> None:
        """Take note of what a step took, from its first bucket to its end, if it is measured."""
        number = self.trial(step)
        if number is not None and (step - self.start) % TRIAL_STEPS >= SETTLING_STEPS:
            self.times[number].append(round(1e6 * seconds))

    def medians(self) -> list[int]:
        """Microseconds of a usual step of each trial on this rank; -1 where none was measured."""
        return [round(statistics.median(times)) if times else -1 for times in self.times]

    def choose(self, totals: list[int]) -> None:
        """Keep the fastest, by the medians added up over ranks; of equal ones the largest groups.

        A trial that was not measured, as in a run that was resumed in the middle of it, cannot be
        chosen. If none was measured, the first is.
        """
        measured = [i for i, total in enumerate(totals) if total >= 0]
        fastest = min(measured, key=lambda i: totals[i], default=0)
        self.chosen = self.choices[fastest]

    def save(self) -> SavedTuning:
        """What a resumed run needs."""
        return SavedTuning(
            start=self.start,
            choices=list(self.choices),
            times=[list(times) for times in self.times],
            chosen=self.chosen,
        )

    def load(self, saved: SavedTuning) -> None:
        """Continue from what `save` returned."""
        self.start, self.choices, self.chosen = saved.start, list(saved.choices), saved.chosen
        self.times = [list(times) for times in saved.times]


def distinct_choices(buckets: list[Bucket]) -> list[int]:
    """Sizes of groups that cut the buckets into different groups, the largest first."""
    numel = sum(bucket.numel for bucket in buckets)
    by_groups: dict[tuple[range, ...], int] = {}
    for num in NUM_GROUPS:
        size = max(-(-numel // num), 1)
        by_groups.setdefault(grouped(buckets, size).groups, size)
    return list(by_groups.values())
