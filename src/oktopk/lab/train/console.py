# SPDX-License-Identifier: Apache-2.0
"""Output of a running command, and warnings on their way into the metrics."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Sequence

from oktopk.lab.runlog.schema import (
    OVERLAPPED_PARTS,
    STEP_PARTS,
    EpochRecord,
    StepRecord,
    ValidationRecord,
    WarningRecord,
)
from oktopk.lab.runlog.writer import RunTotals
from oktopk.lab.tasks.base import Metric
from oktopk.lab.train.config import Config
from oktopk.utils.arguments import format_duration, format_metric

# Output of a running command: a progress bar on a terminal, plain lines elsewhere.


class LineHandler(logging.Handler):
    """Writes log lines to the present `sys.stderr`, which a progress bar replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")
        sys.stderr.flush()


def print_line(text: str) -> None:
    """Print a line to stdout at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class ProgressBar:
    """Progress over all steps of a run. `totals` are those of the run, which counts its steps."""

    def __init__(self, total: int, done: int, config: Config, totals: RunTotals) -> None:
        self._total, self._first, self._config = total, done, config
        self._started = time.monotonic()
        self._totals = totals
        self._progress = None
        if sys.stdout.isatty():
            # imported here: other commands use this module without rich
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = "{task.description}", BarColumn(), "{task.completed}/{task.total}"
            shown = [TextColumn(c) if isinstance(c, str) else c for c in columns]
            left = TextColumn("{task.fields[left]}")
            self._progress = Progress(*shown, left, console=Console())
            self._task = self._progress.add_task("", total=total, completed=done, left="")
            self._progress.start()

    def step(self, record: StepRecord) -> None:
        """Show one finished step. The loss is that of this rank."""
        done = record.step + 1
        if self._progress is not None:
            text, left = self._text(record), self._left(done)
            self._progress.update(self._task, completed=done, description=text, left=left)
        elif done % self._config.log_every == 0 or done == self._total:
            print_line(f"step {done}/{self._total}  {self._text(record)}  {self._left(done)}")

    def _left(self, done: int) -> str:
        """How long the run may still take: until its last step, or the limit of its time."""
        per_step = (time.monotonic() - self._started) / (done - self._first)
        seconds = per_step * (self._total - done)
        if self._config.max_minutes:
            trained = 1e-6 * self._totals.whole.microseconds
            seconds = min(seconds, max(0.0, 60 * self._config.max_minutes - trained))
        return time_left(seconds, self._config)

    def _text(self, record: StepRecord) -> str:
        loss = "skipped" if record.skipped else f"loss {record.loss:.2f}"
        sums = self._totals.whole
        saved = 1 - sums.bytes_sent / sums.bytes_dense if sums.bytes_dense else 0.0
        kept = (record.result or 0) / record.numel if record.numel else 0.0
        percent = round(100 * saved)  # an integer: a fraction may be printed as -0
        return f"{loss}  {record.phase}  density {kept:.2%}  bytes saved {percent}%"

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print_line(text)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def time_left(seconds: float, config: Config) -> str:
    """`2:00 left`; a run with a target may end before that."""
    return f"{'at most ' if config.until else ''}{format_duration(seconds)} left"


def epoch_line(epoch: EpochRecord) -> str:
    """An epoch in one line: the loss, and the time of a step by part."""
    loss = "" if epoch.train_loss is None else f"  train loss {format_metric(epoch.train_loss)}"
    text = f"epoch {epoch.epoch}{loss}"
    if epoch.seconds:
        serial, overlapped = (
            _milliseconds(epoch.seconds, parts) for parts in (STEP_PARTS, OVERLAPPED_PARTS)
        )
        text += f"  (ms per step: {serial}; overlapped: {overlapped})"
    return text


def validation_lines(validation: ValidationRecord, metrics: Sequence[Metric]) -> str:
    """A validation: its metrics in one line, then the samples."""
    values = [
        f"{metric.label} {format_metric(value)}"
        for metric in metrics
        if metric.shown and (value := validation.metrics.get(metric.name)) is not None
    ]
    lines = [f"validated after step {validation.step + 1}: {', '.join(values)}"]
    for sample in validation.samples or ():
        width = max(map(len, sample))
        lines += [f"  {name:{width}} {text}" for name, text in sample.items()]
    return "\n".join(lines)


def _milliseconds(seconds: dict[str, float | None], parts: tuple[str, ...]) -> str:
    return ", ".join(f"{part} {(seconds[part] or 0.0) * 1e3:.0f}" for part in parts)


# `WarningCollector`: logged warnings on their way into the metrics.


log = logging.getLogger("oktopk")


class WarningCollector(logging.Handler):
    """Keeps the warnings that are logged in its block until they are written.

    Any thread may log.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: deque[str] = deque(maxlen=100)

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def __enter__(self) -> WarningCollector:
        log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        log.removeHandler(self)

    def take(self, step: int) -> list[WarningRecord]:
        """The warnings since the last call."""
        texts = [self._texts.popleft() for _ in range(len(self._texts))]
        return [WarningRecord(step=step, text=text) for text in texts]
