"""The report of a comparison: a table, and curves over each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from oktopk.compare.results import (
    METRICS,
    Row,
    as_table,
    bytes_so_far,
    minutes_so_far,
)
from oktopk.report.curves import LOG, line
from oktopk.report.downsample import columns
from oktopk.report.page import (
    Block,
    Figure,
    Section,
    paragraph,
    rounded,
    table,
    write_page,
)
from oktopk.runlog.reader import Record

# what the metric is drawn against: a value for every step of a run
AGAINST: dict[str, tuple[str, Callable[[Record], list[Any]]]] = {
    "steps": ("step", lambda record: [entry["step"] for entry in record.steps]),
    "bytes": ("bytes sent by all workers", bytes_so_far),
    "time": ("minutes of steps, without validation", minutes_so_far),
}
NOTE = "A click on a name hides its curve, a double click all others."


def curves(records: list[Record], metric: str) -> list[Figure]:
    """The metric of every run against steps, against bytes and against time."""
    figures = []
    for against, (axis, values) in AGAINST.items():
        traces = [_metric(record, metric, values(record)) for record in records]
        title = f"{METRICS[metric]} against {against}"
        figures.append(Figure(title, traces, NOTE, _layout(axis, METRICS[metric])))
    return figures


def losses(records: list[Record]) -> list[Figure]:
    """The training loss of every run, against the same three."""
    figures = []
    for against, (axis, values) in AGAINST.items():
        traces = []
        for record in records:
            steps, x = columns(record.steps), values(record)
            at = [x[part.stop - 1] for part in steps.slices]
            traces.append(line(record.folder.name, rounded(at), steps.mean("loss")))
        layout = _layout(axis, "loss")
        layout["yaxis"] |= LOG
        figures.append(Figure(f"Training loss against {against}", traces, NOTE, layout))
    return figures


def _metric(record: Record, metric: str, x: list[Any]) -> dict[str, Any]:
    """Validations of a run, at the value that its step has on the axis."""
    place = {entry["step"]: value for entry, value in zip(record.steps, x, strict=True)}
    found = [entry for entry in record.validated if entry["step"] in place]
    at = [place[entry["step"]] for entry in found]
    return line(record.folder.name, rounded(at), [entry.get(metric) for entry in found])


def _layout(x: str, y: str) -> dict[str, Any]:
    axis = {"title": {"text": x}, "exponentformat": "SI", "rangemode": "tozero"}
    return {"xaxis": axis, "yaxis": {"title": {"text": y}}}


def write_report(path: Path, records: list[Record], rows: list[Row], metric: str) -> None:
    """Write the page; runs that have not taken a step are only in its table."""
    begun = [record for record in records if record.steps]
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
