# SPDX-License-Identifier: Apache-2.0
"""The results of runs as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from oktopk.runlog.aggregates import cumulative_bytes, estimated_totals
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import MetricInfo, ProbeRecord, ValidationRecord
from oktopk.train.target import Target
from oktopk.utils.units import format_bytes, format_duration, format_metric


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a run reached the target. Times are those of training, without validation."""

    seconds: float
    bytes_sent: float
    """Sent by all ranks until then."""

    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run. Bytes are those of all ranks; minutes are those of steps, without validation."""

    setting: str
    state: str
    """finished, stopped, failed, or unfinished when it was killed."""

    steps: int
    metrics: dict[str, float | None]
    """Of the last validation."""

    arrival: Arrival | None = None
    """None if the run did not reach the target, or there is none."""

    speedup: float | None = None
    """The time of the reference run to the target, over the time of this run."""

    to_dense: float | None = None
    """The metric minus that of the reference run with the same seed."""

    xi: float | None = None
    """Mean over the probes of the distance between result and exact top k; None without probes."""

    bytes_sent: int
    ratio: float | None
    """Bytes of a dense run divided by the bytes sent."""

    sparse_ratio: float | None
    ms_per_step: float | None
    """The mean of all steps, so that the table has the same times as the figures; None without any.
    A median would leave out what a method does only in some steps, such as its exchange."""

    minutes: float


def row(runlog: RunLog, target: Target | None = None) -> Row:
    """The row of a run by itself, finished or not."""
    totals = estimated_totals(runlog)
    whole, sparse = totals.whole, totals["sparse"]
    durations = [step.whole for step in runlog.steps if step.whole is not None]
    return Row(
        setting=runlog.directory.name,
        state=runlog.end.how if runlog.end else "unfinished",
        steps=whole.steps,
        metrics=dict(runlog.validations[-1].metrics) if runlog.validations else {},
        arrival=arrival(runlog, target) if target else None,
        xi=_mean([probe.xi for probe in runlog.of(ProbeRecord) if probe.xi is not None]),
        bytes_sent=whole.bytes_sent,
        ratio=_ratio(whole.bytes_dense, whole.bytes_sent),
        sparse_ratio=_ratio(sparse.bytes_dense, sparse.bytes_sent),
        ms_per_step=1e3 * mean(durations) if durations else None,
        minutes=whole.microseconds / 6e7,
    )


def compared(own: Row, reference: Row | None, metric: str) -> Row:
    """The row beside the reference run: the distance of the metric, and how much sooner."""
    if reference is None or reference is own:
        return own
    mine, other = own.metrics.get(metric), reference.metrics.get(metric)
    distance = mine - other if mine is not None and other is not None else None
    speedup = None
    if own.arrival and reference.arrival and own.arrival.seconds > 0:
        speedup = reference.arrival.seconds / own.arrival.seconds
    return replace(own, to_dense=distance, speedup=speedup)


def arrival(runlog: RunLog, target: Target) -> Arrival | None:
    """When the first validation that is as good as the target was made."""
    reached = [record for record in runlog.validations if target.is_reached(record.metrics)]
    if not reached:
        return None
    first: ValidationRecord = reached[0]
    index = next((i for i, step in enumerate(runlog.steps) if step.step == first.step), None)
    sent = cumulative_bytes(runlog)[index] if index is not None else 0.0
    return Arrival(first.seconds or 0.0, sent, first.step + 1)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(dense: int, sent: int) -> float | None:
    return dense / sent if sent else None


def _format(how: str) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else format(value, how)


def or_dash(write: Callable[[Any], str]) -> Callable[[Any], str]:
    """How a value is written that may be missing."""
    return lambda value: "-" if value is None else write(value)


def _signed(difference: float) -> str:
    """A difference of two metrics with its sign, which 0 has too."""
    return f"{'-' if difference < 0 else '+'}{format_metric(abs(difference))}"


Column = tuple[str, Callable[[Row], Any], Callable[[Any], str]]
"""A heading, the value of a row, and how it is written."""

OPTIONAL = ("to target", "speed-up", "sent to target", "to dense", "xi")
"""Columns that are left out when no run has a value."""
IMPORTANT = (
    *("setting", "state", "to target", "speed-up", "lowest to highest", "seeds", "reached"),
    *("sent to target", "to dense", "sent"),
)
"""Columns that a narrow terminal shows first, in this order; the metric is the fifth."""


def columns(metrics: Sequence[MetricInfo]) -> list[Column]:
    """The columns of the table of a comparison."""
    shown: list[Column] = [
        (metric.label, lambda row, name=metric.name: row.metrics.get(name), or_dash(format_metric))
        for metric in metrics
        if metric.shown
    ]
    return [
        ("setting", lambda row: row.setting, str),
        ("state", lambda row: row.state, str),
        (
            "to target",
            lambda row: row.arrival and row.arrival.seconds,
            or_dash(format_duration),
        ),
        ("speed-up", lambda row: row.speedup, _format(".1f")),
        (
            "sent to target",
            lambda row: row.arrival and row.arrival.bytes_sent,
            or_dash(format_bytes),
        ),
        *shown,
        ("to dense", lambda row: row.to_dense, or_dash(_signed)),
        ("xi", lambda row: row.xi, _format(".3f")),
        ("sent", lambda row: row.bytes_sent, format_bytes),
        ("ratio", lambda row: row.ratio, _format(".1f")),
        ("ratio, sparse phase", lambda row: row.sparse_ratio, _format(".1f")),
        ("ms/step", lambda row: row.ms_per_step, _format(".0f")),
        ("minutes", lambda row: row.minutes, _format(".1f")),
    ]


def as_table(rows: list[Row], metrics: Sequence[MetricInfo]) -> list[list[str]]:
    """Headings and cells. Optional columns without values are left out, and so is the state if all
    runs have finished."""
    kept = []
    for heading, value, write in columns(metrics):
        values = [value(row) for row in rows]
        if heading in OPTIONAL and all(found is None for found in values):
            continue
        if heading == "state" and all(found == "finished" for found in values):
            continue
        kept.append([heading, *(write(found) for found in values)])
    return [list(cells) for cells in zip(*kept, strict=True)]


def fitting(cells: list[list[str]], label: str, width: int, gap: int = 2) -> list[list[str]]:
    """The most important columns that fit into a line; `label` is that of the metric to show."""
    heads = cells[0]
    important = [head for head in (*IMPORTANT[:4], label, *IMPORTANT[4:]) if head in heads]
    left, kept = width + gap, set()
    for head in dict.fromkeys([*important, *heads]):
        needed = gap + max(len(row[heads.index(head)]) for row in cells)
        if needed <= left or not kept:
            left, kept = left - needed, kept | {head}
    return [[cell for head, cell in zip(heads, row, strict=True) if head in kept] for row in cells]


def result_line(runlog: RunLog, target: Target | None) -> str:
    """The result of a run in one line."""
    own = row(runlog, target)
    parts = []
    if target is not None:
        parts.append(
            f"{target} after {format_duration(own.arrival.seconds)}"
            if own.arrival
            else f"{target} not reached in {format_duration(60 * own.minutes)}"
        )
    for metric in runlog.metrics:
        value = own.metrics.get(metric.name)
        if metric.shown and value is not None:
            parts.append(f"{metric.label} {format_metric(value)}")
    parts.append(f"sent {format_bytes(own.bytes_sent)}")
    parts += [f"{own.ms_per_step:.0f} ms/step"] if own.ms_per_step is not None else []
    return ", ".join(parts)


def timing_line(runlog: RunLog) -> str:
    """The result of a short run: only the time of its steps means anything."""
    milliseconds = row(runlog).ms_per_step
    return "timed" if milliseconds is None else f"{milliseconds:.0f} ms/step"


def as_plain(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain values, for JSON."""
    return [asdict(row) for row in rows]
