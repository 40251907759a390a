# SPDX-License-Identifier: Apache-2.0
"""`RunState`: what a run has recorded so far, in sums, so that a long run takes little memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from oktopk.runlog.aggregates import RunTotals
from oktopk.runlog.run_directory import METRICS_FILE, has_checkpoint
from oktopk.runlog.schema import (
    EndRecord,
    MetricInfo,
    Record,
    RunRecord,
    StepRecord,
    ValidationRecord,
    WarningRecord,
)
from oktopk.runlog.tail import RunLogTail

RECENT_STEPS = 50
"""Steps by which the present speed is measured."""


@dataclass(slots=True)
class RunState:
    """A run up to now. Bytes are those of rank 0."""

    info: RunRecord | None = None
    last: StepRecord | None = None
    end: EndRecord | None = None
    losses: list[float] = field(default_factory=list)
    validations: list[ValidationRecord] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    resumable: bool = False
    """Whether the run has a checkpoint."""

    totals: RunTotals = field(default_factory=RunTotals)
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    @property
    def steps(self) -> int:
        """Finished steps."""
        return self.last.step + 1 if self.last else 0

    @property
    def total_steps(self) -> int | None:
        return self.info.total_steps if self.info else None

    @property
    def metrics(self) -> list[MetricInfo]:
        """The metrics of the task, the most important first."""
        return self.info.task.metrics if self.info and self.info.task else []

    def values(self, metric: MetricInfo) -> list[float]:
        """What a metric was at every validation."""
        found = (record.metrics.get(metric.name) for record in self.validations)
        return [value for value in found if value is not None]

    def update(self, record: Record) -> None:
        """Take in one record. Kinds that are not shown are ignored."""
        match record:
            case RunRecord():
                self.info, self.end = record, None
            case StepRecord():
                self._add_step(record)
            case ValidationRecord():
                self.validations.append(record)
            case WarningRecord():
                self.warnings.append(record.text)
            case EndRecord():
                self.end = record
            case _:
                pass

    def _add_step(self, step: StepRecord) -> None:
        self.last = step
        self.recent.append(step)
        self.totals.add(step)
        if step.loss is not None:  # another program may record none
            self.losses.append(step.loss)


class RunWatcher:
    """Keeps a `RunState` up to date with a run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tail = RunLogTail(directory / METRICS_FILE)
        self.state = RunState()

    def refresh(self) -> RunState:
        """Read the new records. A run that was resumed is read again from its beginning."""
        rewritten, records = self._tail.read()
        if rewritten:
            self.state = RunState()
        for record in records:
            self.state.update(record)
        self.state.resumable = has_checkpoint(self._directory)
        return self.state
