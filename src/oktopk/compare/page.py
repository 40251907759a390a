# SPDX-License-Identifier: Apache-2.0
"""The report of a comparison: a table, and the curves of all runs in common figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oktopk.compare.networks import folder_of
from oktopk.compare.outcome import conclusion
from oktopk.compare.results import Row, as_table
from oktopk.compare.seeds import averaged, seeds_table
from oktopk.report.colours import PARTS
from oktopk.report.curves import LOG, line
from oktopk.report.downsample import FEW_POINTS, downsample
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
from oktopk.runlog.schema import STEP_PARTS, MetricInfo
from oktopk.train.target import Target

# x axes: a title, and a value for every step of a run
AGAINST: dict[str, tuple[str, Callable[[RunLog], list[Any]]]] = {
    "time": ("minutes of training, without validation", cumulative_minutes),
    "bytes": ("bytes sent by all workers", cumulative_bytes),
    "steps": ("step", lambda runlog: [step.step for step in runlog.steps]),
}
TIME_NOTE = (
    "Exposed is the time spent waiting for the exchange. The part that overlaps with backward "
    "takes no time of its own here."
)
TIMED = (
    "A method takes the same steps on every network. Each run was trained once, and a short run "
    "measured what its steps take on this network."
)
SEEDS = "Means of all finished seeds of each setting:"
NOTE = "A click on a name hides its curve, a double click all others."


def curves(runlogs: list[RunLog], metric: MetricInfo, target: Target | None) -> list[Figure]:
    """The metric of every run against time, against bytes and against steps."""
    figures = []
    for against, (axis, values) in AGAINST.items():
        traces = [_metric(runlog, metric.name, values(runlog)) for runlog in runlogs]
        layout, note = _layout(axis, metric.label), NOTE
        if target is not None and target.metric.name == metric.name:
            layout |= _target_line(target)
            note = f"The dashed line is the target: {target}. {NOTE}"
        title = f"{_capitalized(metric.label)} against {against}"
        figures.append(Figure(title, traces, note, layout))
    return figures


def _capitalized(label: str) -> str:
    """`Validation loss`, for a title. The rest stays as it is: `WER`."""
    return label[:1].upper() + label[1:]


def _target_line(target: Target) -> dict[str, Any]:
    """A dashed line at the target. Its text would lie on the curves: it is in the note."""
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y"}
    line |= {"y0": target.value, "y1": target.value, "line": {"dash": "dash", "width": 1}}
    return {"shapes": [line]}


def where_time_went(runlogs: list[RunLog]) -> list[Figure]:
    """Seconds of all steps of every run, by part: one bar for each run."""
    names = [runlog.directory.name for runlog in runlogs]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "marker": {"color": PARTS[part]},
            "y": names,
            "x": rounded(
                sum(getattr(step, part) or 0.0 for step in runlog.steps) for runlog in runlogs
            ),
        }
        for part in STEP_PARTS
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "seconds of training on rank 0"}},
        "yaxis": {"autorange": "reversed"},
    }
    return [Figure("Where the time went", traces, TIME_NOTE, layout)]


def losses(runlogs: list[RunLog]) -> list[Figure]:
    """The training loss of every run against steps, bytes and time."""
    figures = []
    for against, (axis, values) in AGAINST.items():
        traces = []
        for runlog in runlogs:
            steps, x = downsample(runlog.steps, FEW_POINTS), values(runlog)
            at = [x[part.stop - 1] for part in steps.slices]
            smooth = line(runlog.directory.name, rounded(at), steps.median("loss"))
            traces.append(smooth | {"mode": "lines"})
        layout = _layout(axis, "loss")
        layout["yaxis"] |= LOG
        note = f"Medians of consecutive steps. {NOTE}"
        figures.append(Figure(f"Training loss against {against}", traces, note, layout))
    return figures


def _metric(runlog: RunLog, metric: str, x: list[Any]) -> dict[str, Any]:
    """The validations of a run, at the x value of their step."""
    x_of = {step.step: value for step, value in zip(runlog.steps, x, strict=True)}
    records = [record for record in runlog.validations if record.step in x_of]
    at = [x_of[record.step] for record in records]
    values = [record.metrics.get(metric) for record in records]
    return line(runlog.directory.name, rounded(at), values)


def _layout(x: str, y: str) -> dict[str, Any]:
    axis = {"title": {"text": x}, "exponentformat": "SI", "rangemode": "tozero"}
    return {"xaxis": axis, "yaxis": {"title": {"text": y}}}


@dataclass(frozen=True, slots=True)
class Place:
    """The runs of a comparison on one network."""

    network: str
    """Where their steps were timed; empty for the network on which they were trained."""

    runlogs: list[RunLog]
    rows: list[Row]
    problems: tuple[str, ...] = ()
    """Why runs were left out."""

    @property
    def suffix(self) -> str:
        """For the names of files."""
        return f"-{folder_of(self.network)}" if self.network else ""


def judged(places: list[Place]) -> list[Place]:
    """The networks on which runs were timed; if there is none, the one of the training.

    With timings, how long the training itself took says nothing: other work may have run beside it.
    """
    return [place for place in places[1:] if place.runlogs] or places[:1]


def write_report(path: Path, places: list[Place], metric: str, target: Target | None) -> None:
    """Write the page. Runs without a finished step are in the table only."""
    trained = places[0]
    begun = [runlog for runlog in trained.runlogs if runlog.steps]
    metrics = next((runlog.metrics for runlog in trained.runlogs if runlog.metrics), [])
    shown = next((info for info in metrics if info.name == metric), MetricInfo(metric, metric))
    cells = as_table(trained.rows, metrics)
    during = " in the training, which was not on these networks" if len(places) > 1 else ""
    whole: list[Block] = [table(cells[0], cells[1:]), *_over_seeds(trained, shown, target)]
    sections = [
        *(_timed(place, shown, metrics, target) for place in places[1:] if place.runlogs),
        Section(_capitalized(shown.label), curves(begun, shown, target) if begun else []),
        Section("Runs", whole),
        Section(f"Where the time went{during}", where_time_went(begun) if begun else []),
        Section("Training loss", losses(begun) if begun else []),
    ]
    texts = [
        *(conclusion(place.runlogs, place.rows, shown, target) for place in judged(places)),
        *(problem for place in places for problem in place.problems),
        "The same training, exchanged in different ways. Bytes are those of all workers.",
    ]
    opening = "\n".join(paragraph(text, "summary") for text in texts if text)
    write_page(path, f"{path.parent.resolve().name}: comparison of runs", opening, sections)


def _timed(
    place: Place, metric: MetricInfo, metrics: list[MetricInfo], target: Target | None
) -> Section:
    """The metric against the time that the runs would have taken on a network, and its parts."""
    cells = as_table(place.rows, metrics)
    figures = [curves(place.runlogs, metric, target)[0], *where_time_went(place.runlogs)]
    metric_figure, parts = (
        replace(figure, title=f"{figure.title} at {place.network}", note=f"{TIMED} {figure.note}")
        for figure in figures
    )
    blocks: list[Block] = [
        metric_figure,
        table(cells[0], cells[1:]),
        *_over_seeds(place, metric, target),
        parts,
    ]
    return Section(f"Timed at {place.network}", blocks)


def _over_seeds(place: Place, metric: MetricInfo, target: Target | None) -> list[Block]:
    """A table with one row for all seeds of a setting, if there are several."""
    settings = averaged(place.runlogs, place.rows, metric.name)
    cells = seeds_table(settings, metric, is_race=target is not None)
    return [paragraph(SEEDS), table(cells[0], cells[1:])] if cells else []
