# SPDX-License-Identifier: Apache-2.0
"""The results of a comparison: rows, seeds, tables, a verdict, and the page."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import get_terminal_size
from statistics import mean
from typing import Any

from oktopk.errors import RunError
from oktopk.lab.compare.networks import TIMING, folder_of, on_network, without_seed
from oktopk.lab.compare.plan import REPORT
from oktopk.lab.report.charts import FEW_POINTS, LOG, downsample, line
from oktopk.lab.report.page import (
    PARTS,
    Block,
    Figure,
    Section,
    aligned,
    markdown,
    paragraph,
    rounded,
    table,
    write_page,
)
from oktopk.lab.runlog.reader import METRICS_FILE, RunLog, read_runlog
from oktopk.lab.runlog.schema import STEP_PARTS, MetricInfo, ProbeRecord, ValidationRecord
from oktopk.lab.runlog.writer import cumulative_bytes, cumulative_minutes, estimated_totals
from oktopk.lab.tasks.base import AUTO
from oktopk.lab.train.setup import Target
from oktopk.utils.arguments import format_bytes, format_duration, format_metric
from oktopk.utils.files import write_atomically

# The results of runs as rows of a table.


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


# The outcome of a comparison in a sentence or two.


REFERENCES = ("ddp_dense", "dense")
"""Methods that the others are compared with: the first that has a run."""


def reference_of(runlogs: Sequence[RunLog], runlog: RunLog) -> int | None:
    """The number of the run that a run is compared with: dense, with the same seed."""
    seed = runlog.config.get("seed")
    for method in REFERENCES:
        for i, other in enumerate(runlogs):
            if other.config.get("method") == method and other.config.get("seed") == seed:
                return i
    return None


def network_of(runlogs: Sequence[RunLog]) -> str:
    """The network of all runs, for a sentence; says so if they had different ones."""
    networks = {runlog.info.network or "" for runlog in runlogs if runlog.steps}
    if len(networks) > 1:
        return " (on different networks)"
    return "".join(f" at {network}" for network in networks if network)


def verdict(runlogs: Sequence[RunLog], rows: Sequence[Row], target: Target | None) -> str:
    """Who reached the target first, and how much sooner than dense; empty without a target."""
    if target is None or not rows:
        return ""
    network = network_of(runlogs)
    arrived = sorted(
        (row.arrival.seconds, i) for i, row in enumerate(rows) if row.arrival is not None
    )
    if not arrived:
        return f"No run reached {target}{network}."
    seconds, best = arrived[0]
    first = rows[best]
    assert first.arrival is not None
    text = (
        f"{first.setting} reached {target}{network} first, after {format_duration(seconds)} of "
        f"training and {format_bytes(first.arrival.bytes_sent)}"
    )
    reference = reference_of(runlogs, runlogs[best])
    if reference is None or reference == best:
        return f"{text}."
    return f"{text}; {_behind(first, rows[reference])}."


def _behind(first: Row, reference: Row) -> str:
    """How far the reference run was behind."""
    assert first.arrival is not None
    if reference.arrival is None:
        after = f"in {format_duration(60 * reference.minutes)}"
        if reference.state != "finished":
            return f"{reference.setting} is {reference.state}, and had not reached it {after}"
        return (
            f"{reference.setting} did not reach it {after} and {format_bytes(reference.bytes_sent)}"
        )
    sooner = reference.arrival.seconds / first.arrival.seconds if first.arrival.seconds else 0.0
    took = (
        f"{reference.setting} took {format_duration(reference.arrival.seconds)} and "
        f"{format_bytes(reference.arrival.bytes_sent)}: {sooner:.1f} times sooner"
    )
    ratio = reference.arrival.bytes_sent / (first.arrival.bytes_sent or 1.0)
    return f"{took}, with {ratio:.1f} times fewer bytes" if ratio > 1 else took


# Several seeds of one setting as one row: their mean, and how far they lie apart.


RACE = ("reached", "to target", "speed-up", "sent to target")
"""Columns of a race, which are left out if there is no target."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """The finished runs of a setting, and their mean as one row."""

    runlog: RunLog
    """The first of the runs, with the name of the setting and without a seed."""

    rows: list[Row]
    row: Row


def setting_of(runlog: RunLog) -> str:
    """The name of a run without its seed."""
    return without_seed(runlog.directory.name, runlog.config.get("seed", 0))


def averaged(runlogs: Sequence[RunLog], rows: Sequence[Row], metric: str) -> list[Averaged]:
    """The settings with finished runs; empty unless one of them has several seeds.

    A setting has reached the target if all its finished runs have, after the mean of their times.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for i, runlog in enumerate(runlogs):
        if rows[i].state == "finished":
            groups[setting_of(runlog)].append(i)
    if all(len(group) < 2 for group in groups.values()):
        return []
    found = [
        Averaged(_unseeded(runlogs[group[0]]), own, _mean_row(setting, own))
        for setting, group in groups.items()
        if (own := [rows[i] for i in group])
    ]
    references = [reference_of([one.runlog for one in found], one.runlog) for one in found]
    return [
        replace(one, row=compared(one.row, None if i is None else found[i].row, metric))
        for one, i in zip(found, references, strict=True)
    ]


def seeds_table(
    settings: Sequence[Averaged], metric: MetricInfo, *, is_race: bool
) -> list[list[str]]:
    """Headings and a row of cells for each setting; empty without settings."""
    if not settings:
        return []
    columns = _columns(metric)
    heads = [head for head in columns if is_race or head not in RACE]
    return [heads, *([columns[head](one) for head in heads] for one in settings)]


def _columns(metric: MetricInfo) -> dict[str, Callable[[Averaged], str]]:
    """By heading: how the cell of a setting is written."""

    def spread(one: Averaged) -> str:
        values = [row.metrics.get(metric.name) for row in one.rows]
        known = [value for value in values if value is not None]
        if len(known) < 2:
            return "-"
        return f"{format_metric(min(known))} to {format_metric(max(known))}"

    return {
        "setting": lambda one: one.row.setting,
        "seeds": lambda one: str(len(one.rows)),
        "reached": lambda one: (
            f"{sum(row.arrival is not None for row in one.rows)} of {len(one.rows)}"
        ),
        "to target": lambda one: or_dash(format_duration)(
            one.row.arrival and one.row.arrival.seconds
        ),
        "speed-up": lambda one: or_dash("{:.1f}".format)(one.row.speedup),
        "sent to target": lambda one: or_dash(format_bytes)(
            one.row.arrival and one.row.arrival.bytes_sent
        ),
        metric.label: lambda one: or_dash(format_metric)(one.row.metrics.get(metric.name)),
        "lowest to highest": spread,
    }


def _unseeded(runlog: RunLog) -> RunLog:
    """The run under the name of its setting. Without seeds, each is compared with the dense one."""
    directory = runlog.directory.with_name(setting_of(runlog))
    return RunLog(directory, runlog.config | {"seed": 0}, runlog.records, runlog.problems)


def _mean_row(setting: str, rows: list[Row]) -> Row:
    """The means of the rows. A metric that one of them lacks has none."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    arrivals = [row.arrival for row in rows if row.arrival is not None]
    return replace(
        rows[0],
        setting=setting,
        metrics={name: _mean_or_none([row.metrics.get(name) for row in rows]) for name in names},
        arrival=_mean_arrival(arrivals) if len(arrivals) == len(rows) else None,
        bytes_sent=round(mean(row.bytes_sent for row in rows)),
        ms_per_step=_mean_or_none([row.ms_per_step for row in rows]),
        minutes=mean(row.minutes for row in rows),
    )


def _mean_arrival(arrivals: list[Arrival]) -> Arrival:
    return Arrival(
        mean(one.seconds for one in arrivals),
        mean(one.bytes_sent for one in arrivals),
        round(mean(one.steps for one in arrivals)),
    )


def _mean_or_none(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


# The outcome of a comparison: who reached the target, or metric, bytes and time beside dense.


FEWER = 1.05
"""Ratios of bytes below it, and above its inverse, are called equal."""


def conclusion(
    runlogs: Sequence[RunLog], rows: Sequence[Row], metric: MetricInfo, target: Target | None
) -> str:
    """The verdict of a race; without a target, how the best run ended beside its dense run.

    With several seeds it is about the means of settings: the best single run may just be lucky.
    """
    if settings := averaged(runlogs, rows, metric.name):
        runlogs = [one.runlog for one in settings]
        rows = [one.row for one in settings]
    said = verdict(runlogs, rows, target) or outcome(runlogs, rows, metric)
    return f"{said} These are means of all seeds." if settings and said else said


def outcome(runlogs: Sequence[RunLog], rows: Sequence[Row], metric: MetricInfo) -> str:
    """The run with the best metric beside its dense run; empty if no run has the metric."""
    finished = [
        (value, i)
        for i, row in enumerate(rows)
        if row.state == "finished" and (value := row.metrics.get(metric.name)) is not None
    ]
    others = [pair for pair in finished if reference_of(runlogs, runlogs[pair[1]]) != pair[1]]
    if not others:
        return ""
    value, best = (max if metric.higher_is_better else min)(others)
    ended = f"{metric.label} {format_metric(value)}{network_of(runlogs)}"
    text = f"{rows[best].setting} ended with {ended}"
    reference = reference_of(runlogs, runlogs[best])
    known = rows[reference].metrics.get(metric.name) if reference is not None else None
    if reference is None or known is None:
        return f"{text}."
    beside = f"{rows[reference].setting} with {format_metric(known)}"
    return f"{text}, and {beside}; it sent {_bytes(rows[best], rows[reference])}."


def _bytes(row: Row, reference: Row) -> str:
    """How many times fewer or more bytes, and how long a step took."""
    ratio = reference.bytes_sent / (row.bytes_sent or 1)
    sent = "as many bytes"
    if ratio >= FEWER:
        sent = f"{ratio:.1f} times fewer bytes"
    elif 0 < ratio <= 1 / FEWER:
        sent = f"{1 / ratio:.1f} times as many bytes"
    if not row.ms_per_step or not reference.ms_per_step:
        return sent
    times = f"{row.ms_per_step:.0f} ms instead of {reference.ms_per_step:.0f} ms"
    return f"{sent}, and a step took {times}"


# The report of a comparison: a table, and the curves of all runs in common figures.


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
        *(_timed_section(place, shown, metrics, target) for place in places[1:] if place.runlogs),
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


def _timed_section(
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


# The files of a comparison: a table for every network, and the page.


def write_tables(
    folder: Path, metric: str, target: Target | None, networks: Sequence[str] = ()
) -> str:
    """Write the tables and the report of all runs in the folder. Returns the tables as text."""
    paths = folder.glob(f"*/{METRICS_FILE}")
    runlogs = sorted((read_runlog(path.parent) for path in paths), key=_order)
    if not runlogs:
        return "no run has begun"
    metrics = next((runlog.metrics for runlog in runlogs if runlog.metrics), [])
    shown = next((info for info in metrics if info.name == metric), MetricInfo(metric, metric))
    places = [Place("", runlogs, _rows(runlogs, metric, target))]
    places += [_timed(runlogs, name, metric, target) for name in networks]
    texts = []
    for place in places:
        if place.runlogs:
            cells = as_table(place.rows, metrics)
            write_atomically(folder / f"table{place.suffix}.md", markdown(cells))
            rows = json.dumps(as_plain(place.rows), indent=1) + "\n"
            write_atomically(folder / f"table{place.suffix}.json", rows)
            heading = f"timed at {place.network}:" if place.network else ""
            width = get_terminal_size().columns
            texts += [heading, aligned(fitting(cells, shown.label, width))]
            settings = averaged(place.runlogs, place.rows, metric)
            if by_seeds := seeds_table(settings, shown, is_race=target is not None):
                write_atomically(folder / f"seeds{place.suffix}.md", markdown(by_seeds))
                texts += ["means of all seeds:", aligned(fitting(by_seeds, shown.label, width))]
            if any(place is one for one in judged(places)):
                texts.append(conclusion(place.runlogs, place.rows, shown, target))
        texts += place.problems
    write_report(folder / REPORT, places, metric, target)
    names = ", ".join(path.name for path in sorted(folder.glob("*.md")))
    return "\n".join(filter(None, [*texts, f"{folder}: {names}, table.json, {REPORT}"]))


def _timed(runlogs: list[RunLog], name: str, metric: str, target: Target | None) -> Place:
    """The runs whose steps were timed on a network, as they would have been there."""
    timed, problems, untimed = [], [], {}
    for runlog in runlogs:
        folder, setting = runlog.directory.parent, setting_of(runlog)
        timing = read_runlog(folder / TIMING / folder_of(name) / setting)
        if runlog.finished and timing.finished:
            try:
                timed.append(on_network(runlog, timing, name))
            except RunError as error:  # said below the table, which has the others
                problems.append(str(error))
        elif runlog.finished:
            untimed[setting] = f"{setting} was not timed at {name}"
    problems += untimed.values() if timed else ()
    return Place(name, timed, _rows(timed, metric, target), tuple(problems))


def _rows(runlogs: list[RunLog], metric: str, target: Target | None) -> list[Row]:
    """The rows of the runs, each beside the reference run with the same seed."""
    rows = [row(runlog, target) for runlog in runlogs]
    found = [reference_of(runlogs, runlog) for runlog in runlogs]
    return [
        compared(own, None if i is None else rows[i], metric)
        for own, i in zip(rows, found, strict=True)
    ]


def _order(runlog: RunLog) -> tuple[int, str, float, int, int]:
    """The references first, then by method, density, interval and seed."""
    method = runlog.config.get("method", "")
    density = runlog.config.get("density", 0.0)
    numbers = (runlog.config.get(name, 0) for name in ("every", "seed"))
    rest = (0.0 if density == AUTO else density, *numbers)
    return (REFERENCES.index(method) if method in REFERENCES else len(REFERENCES), method, *rest)
