# SPDX-License-Identifier: Apache-2.0
"""What a comparison shows while a run trains: one line that says how far it is."""

from __future__ import annotations

import sys
import time
from shutil import get_terminal_size

from oktopk.runlog.schema import Record, RunRecord, StepRecord, ValidationRecord
from oktopk.train.config import Config
from oktopk.train.console import print_line, time_left
from oktopk.utils.units import format_duration, format_metric

LINE_SECONDS = 15.0
"""Seconds between two lines of output, when stdout is not a terminal."""


class RunProgress:
    """Follows the records of a run, and shows a line about it.

    On a terminal the line is rewritten in place; elsewhere a line is printed now and then.
    """

    def __init__(self, place: str, config: Config, runs_after: int) -> None:
        self.place, self.config, self._runs_after = place, config, runs_after
        self._info: RunRecord | None = None
        self._steps, self._seconds = 0, 0.0
        self._metric = ""
        self._on_terminal = sys.stdout.isatty()
        self._due = time.monotonic() + LINE_SECONDS
        self._width = 0

    def __call__(self, records: list[Record]) -> bool:
        """Take the new records. Never asks for the run to end."""
        for record in records:
            self._take(record)
        if self._on_terminal:
            text = self.line()[: get_terminal_size().columns - 1]  # a line that wraps stays
            sys.stdout.write(f"\r{text:{self._width}}")
            sys.stdout.flush()
            self._width = len(text)
        elif time.monotonic() >= self._due:
            print_line(self.line())
            self._due = time.monotonic() + LINE_SECONDS
        return False

    def _take(self, record: Record) -> None:
        match record:
            case RunRecord():
                self._info = record
                if record.step == 0:  # a resumed run writes its file again: count from the start
                    self._steps, self._seconds, self._metric = 0, 0.0, ""
            case StepRecord():
                self._steps = record.step + 1
                self._seconds += record.whole or 0.0
            case ValidationRecord():
                self._metric = self._shown(record)
            case _:
                pass

    def _shown(self, record: ValidationRecord) -> str:
        metrics = self._info.task.metrics if self._info and self._info.task else []
        for metric in metrics[:1]:
            value = record.metrics.get(metric.name)
            if value is not None:
                return f"{metric.label} {format_metric(value)}"
        return ""

    def line(self) -> str:
        """How far the run is, and how long it may still take."""
        if not self._steps:
            return f"{self.place}: starting"
        total = self._info.total_steps if self._info else None
        parts = [f"step {self._steps}" + (f" of {total}" if total else ""), self._metric]
        parts.append(f"{format_duration(self._seconds)} of training")
        left = self._seconds_left(total)
        if left is not None:
            parts.append(time_left(left, self.config))
        if self._runs_after:
            parts.append(f"{self._runs_after} more to train{self._all_left(left)}")
        return f"{self.place}: {', '.join(filter(None, parts))}"

    def _all_left(self, left: float | None) -> str:
        """The time until the end of the last run, where every run has the same limit of time."""
        if left is None or not self.config.max_minutes:
            return ""
        most = left + 60 * self.config.max_minutes * self._runs_after
        return f" (at most {format_duration(most)} in all)"

    def _seconds_left(self, total: int | None) -> float | None:
        """Seconds of training until the last step, or until the limit of time."""
        limits = []
        if total:
            limits.append(self._seconds / self._steps * max(0, total - self._steps))
        if self.config.max_minutes:
            limits.append(max(0.0, 60 * self.config.max_minutes - self._seconds))
        return min(limits, default=None)

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the line; after Ctrl-C it stays, with what the terminal wrote behind it."""
        if self._on_terminal and self._width:
            sys.stdout.write("\n" if kind else f"\r{'':{self._width}}\r")
            sys.stdout.flush()
