"""The report of a comparison: a table, and the curves of all runs in common figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from oktopk.compare.results import (
    METRICS,
    Row,
    as_table,
)
from oktopk.report.curves import LOG, line
from oktopk.report.downsample import downsample
from oktopk.report.page import (
    Block,
    Figure,
    Section,
    paragraph,
    rounded,
    table,
    write_page,
)
from oktopk.runlog.aggregates import cumulative_bytes, cumulative_minutes
from oktopk.runlog.reader import RunLog

# x axes: a title, and a value for every step of a run
AGAINST: dict[str, tuple[str, Callable[[RunLog], list[Any]]]] = {
    "steps": ("step", lambda runlog: [step.step for step in runlog.steps]),
    "bytes": ("bytes sent by all workers", cumulative_bytes),
    "time": ("minutes of steps, without validation", cumulative_minutes),
}
NOTE = "A click on a name hides its curve, a double click all others."


def curves(runlogs: list[RunLog], metric: str) -> list[Figure]:
    """The metric of every run against steps, against bytes and against time."""
    figures = []
    for against, (axis, values) in AGAINST.items():
        traces = [_metric(runlog, metric, values(runlog)) for runlog in runlogs]
        title = f"{METRICS[metric]} against {against}"
        figures.append(Figure(title, traces, NOTE, _layout(axis, METRICS[metric])))
    return figures


def losses(runlogs: list[RunLog]) -> list[Figure]:
    """The training loss of every run against steps, bytes and time."""
    figures = []
    for against, (axis, values) in AGAINST.items():
        traces = []
        for runlog in runlogs:
            steps, x = downsample(runlog.steps), values(runlog)
            at = [x[part.stop - 1] for part in steps.slices]
            traces.append(line(runlog.directory.name, rounded(at), steps.mean("loss")))
        layout = _layout(axis, "loss")
        layout["yaxis"] |= LOG
        figures.append(Figure(f"Training loss against {against}", traces, NOTE, layout))
    return figures


def _metric(runlog: RunLog, metric: str, x: list[Any]) -> dict[str, Any]:
    """The validations of a run, at the x value of their step."""
    x_of = {step.step: value for step, value in zip(runlog.steps, x, strict=True)}
    epochs = [epoch for epoch in runlog.validated if epoch.step in x_of]
    at = [x_of[epoch.step] for epoch in epochs]
    return line(runlog.directory.name, rounded(at), [getattr(epoch, metric) for epoch in epochs])


def _layout(x: str, y: str) -> dict[str, Any]:
    axis = {"title": {"text": x}, "exponentformat": "SI", "rangemode": "tozero"}
    return {"xaxis": axis, "yaxis": {"title": {"text": y}}}


def write_report(path: Path, runlogs: list[RunLog], rows: list[Row], metric: str) -> None:
    """Write the page. Runs without a finished step are in the table only."""
    begun = [runlog for runlog in runlogs if runlog.steps]
    cells = as_table(rows)
    whole: list[Block] = [table(cells[0], cells[1:])]
    sections = [
        Section("Runs", whole),
        Section(METRICS[metric], curves(begun, metric) if begun else []),
        Section("Training loss", losses(begun) if begun else []),
    ]
    opening = paragraph(
        "The same training, exchanged in different ways. Bytes are those of all workers."
    )
    write_page(path, f"{path.parent.resolve().name}: comparison of runs", opening, sections)
