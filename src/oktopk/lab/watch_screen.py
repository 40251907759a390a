# SPDX-License-Identifier: Apache-2.0
"""What `oktopk watch` shows of a run: its state in sums, and a panel or a line."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from oktopk.lab.runlog.reader import METRICS_FILE, RunLogTail, has_checkpoint
from oktopk.lab.runlog.schema import (
    OVERLAPPED_PARTS,
    STEP_PARTS,
    TIMED_PARTS,
    EndRecord,
    MetricInfo,
    Record,
    RunRecord,
    StepRecord,
    ValidationRecord,
    WarningRecord,
)
from oktopk.lab.runlog.writer import RunTotals
from oktopk.utils.arguments import format_bytes, format_duration, format_metric

# `RunState`: what a run has recorded so far, in sums, so that a long run takes little memory.


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


# What `oktopk watch` shows: a panel of a few lines, or one line for a log.


BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 32
SILENT_SECONDS = 120.0
"""Seconds without new records after which a run may be dead. Validation takes a while too."""
COLOURS = {"finished": "green", "running": "cyan", "stopped": "yellow", "failed": "red"}
SHOWN_WARNINGS = 3


def screen(state: RunState, name: str, quiet: float, others: str = "") -> RenderableType:
    """The panel. `quiet` is the seconds since the last record, `others` a hint at other runs."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows(state, quiet):
        grid.add_row(label, Text(text))
    if others:
        grid.add_row("", Text(others))
    return Panel(grid, title=Text(name), border_style=COLOURS.get(status(state, quiet), "yellow"))


def line(state: RunState, quiet: float, others: str = "") -> str:
    """One line for a log."""
    if state.last is None:
        return "; ".join(filter(None, (_status_line(state, quiet), others)))
    total = state.total_steps
    parts = [status(state, quiet), f"step {state.steps}" + (f" of {total}" if total else "")]
    parts.append(f"{state.last.phase} phase")
    parts += [f"loss {format_metric(state.losses[-1])}"] if state.losses else []
    for metric in state.metrics[:1]:
        parts += [f"{metric.label} {format_metric(value)}" for value in state.values(metric)[-1:]]
    parts += [f"about {format_duration(_seconds_left(state, total))} left"] if total else []
    return ", ".join(parts)


def rows(state: RunState, quiet: float) -> list[tuple[str, str]]:
    """Label and text of every line of the panel that is not empty."""
    found = [("status", _status_line(state, quiet))]
    found += [(label, text) for label, write in LINES.items() if (text := write(state))]
    found += [("warning", text) for text in state.warnings[-SHOWN_WARNINGS:]]
    more = len(state.warnings) - SHOWN_WARNINGS
    return [*found, ("", f"and {more} warnings before")] if more > 0 else found


def status(state: RunState, quiet: float) -> str:
    """One word for the run."""
    if state.end is not None:
        return state.end.how
    if state.info is None and state.last is None:
        return "waiting"
    return "silent" if quiet > SILENT_SECONDS else "running"


def _status_line(state: RunState, quiet: float) -> str:
    word = status(state, quiet)
    if word == "waiting":
        return "waiting for the run to begin"
    if word == "silent":
        advice = "; `oktopk train --resume` continues it" if state.resumable else ""
        silence = f"nothing was recorded for {format_duration(quiet)}"
        return f"{silence}: the run may have been killed{advice}"
    if state.end is not None:
        return ": ".join(filter(None, (word, state.end.text)))
    settings = (state.info.settings if state.info else None) or {}
    workers = state.info.size if state.info else None
    method, density = settings.get("method") or "", settings.get("density")
    method += f" at density {density:g}" if method != "dense" and density is not None else ""
    ranks = f"{workers} worker{'s' * (workers != 1)}" if workers else ""
    return ", ".join(filter(None, (word, method.strip(), ranks)))


def _progress(state: RunState) -> str:
    if state.last is None:
        return ""
    total, phase = state.total_steps, f"{state.last.phase} phase"
    if not total:
        return f"step {state.steps}, {phase}"
    share = min(1.0, state.steps / total)
    full = round(share * WIDTH)
    text = f"{'█' * full}{'░' * (WIDTH - full)} {share:.0%}, step {state.steps} of {total}, {phase}"
    return (
        text if state.end else f"{text}, about {format_duration(_seconds_left(state, total))} left"
    )


def _seconds_left(state: RunState, total: int) -> float:
    """Seconds of the steps that are left, without validation."""
    return _mean_seconds(state, "whole") * max(0, total - state.steps)


def _mean_seconds(state: RunState, part: str) -> float:
    """Mean seconds of a part of the recent steps."""
    return sum(getattr(step, part) or 0.0 for step in state.recent) / len(state.recent)


def _loss(state: RunState) -> str:
    if not state.losses:
        return ""
    skipped = state.totals.whole.skipped
    note = f", {skipped} steps skipped" if skipped else ""
    return f"{sparkline(state.losses)} {format_metric(state.losses[-1])}{note}"


def _validation(state: RunState) -> str:
    """The most important metric over all validations, and the others of the last one."""
    shown = [(m.label, values) for m in state.metrics if m.shown and (values := state.values(m))]
    if not shown:
        return ""
    last = ", ".join(f"{label} {format_metric(values[-1])}" for label, values in shown)
    return f"{sparkline(shown[0][1])} {last} after step {state.validations[-1].step + 1}"


def _traffic(state: RunState) -> str:
    whole, sparse = state.totals.whole, state.totals["sparse"]
    sent, dense = whole.bytes_sent, whole.bytes_dense
    if not dense or not sent:
        return ""
    text = f"{format_bytes(sent)} by worker 0 for {format_bytes(dense)} dense"
    text += f", {1 - sent / dense:.0%} saved"
    if sparse.bytes_sent:
        text += f"; sparse phase {sparse.bytes_dense / sparse.bytes_sent:.1f}x less"
    return text


def _time(state: RunState) -> str:
    """The time of the recent steps by part."""
    if not state.recent:
        return ""
    means = {part: _mean_seconds(state, part) for part in TIMED_PARTS}
    if not means["whole"]:
        return ""
    shares = ", ".join(f"{part} {means[part] / means['whole']:.0%}" for part in STEP_PARTS)
    overlapped = ", ".join(f"{part} {means[part] * 1e3:.0f}" for part in OVERLAPPED_PARTS)
    return f"{means['whole'] * 1e3:.0f} ms a step: {shares}\noverlapped, in ms: {overlapped}"


LINES = {
    "progress": _progress,
    "loss": _loss,
    "validation": _validation,
    "sent": _traffic,
    "time": _time,
}


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """The values as at most `width` blocks, each the mean of its share of them."""
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        values = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    low, high = min(values), max(values)
    steps = len(BLOCKS) - 1
    return "".join(
        BLOCKS[round((value - low) / (high - low) * steps) if high > low else 0] for value in values
    )
