"""The report of a sweep: what mattered, and what the trials came to."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from oktopk.compare.results import METRICS
from oktopk.report.page import Figure, Section, paragraph, rounded, table, write_page
from oktopk.sweep.results import Result, as_table, ranked
from oktopk.sweep.space import Range

WORST = 3.0
"""Colours and axes end at so many times the best: a trial that diverged says nothing more."""


def importance(shares: dict[str, float]) -> list[Figure]:
    """How much each setting mattered."""
    if not shares:
        return []
    names = sorted(shares, key=shares.__getitem__)
    bars = {"type": "bar", "orientation": "h", "x": rounded(shares[n] for n in names), "y": names}
    note = "The share of the metric's variance that a setting explains by itself (fANOVA)."
    return [Figure("What mattered", [bars], note, {"xaxis": {"tickformat": "~%"}})]


def history(found: list[Result], metric: str) -> Figure:
    """The metric of every trial in order, and the best so far."""
    traces = [
        _points(state, [(i, r) for i, r in enumerate(found) if r.state == state])
        for state in sorted({result.state for result in found})
    ]
    done = [(i, r.metric) for i, r in enumerate(found) if r.state == "finished"]
    lowest = accumulate((value for _, value in done if value is not None), min)
    best = {"type": "scatter", "mode": "lines", "name": "best so far", "line": {"shape": "hv"}}
    best |= {"x": [i for i, _ in done], "y": rounded(lowest)}
    return Figure("Trials in order", [*traces, best], "", _axes("trial", METRICS[metric]))


def slices(found: list[Result], space: dict[str, Range], metric: str) -> list[Figure]:
    """The metric against each setting alone."""
    figures = []
    for name, one in space.items():
        traces = [
            _points(state, [(r.values.get(name), r) for r in found if r.state == state])
            for state in sorted({result.state for result in found})
        ]
        layout = _axes(name, METRICS[metric])
        layout["xaxis"]["type"] = "log" if one.by_ratio else "linear"
        figures.append(Figure(f"{METRICS[metric]} against {name}", traces, "", layout))
    return figures


def parallel(found: list[Result], space: dict[str, Range], metric: str) -> list[Figure]:
    """Every trial as a line through its settings."""
    from math import log10

    known = [result for result in found if result.metric is not None]
    if len(known) < 2:
        return []
    ends = [result.metric for result in known if result.metric is not None]
    axes: list[dict[str, Any]] = []
    for name, one in space.items():
        column = [result.values[name] for result in known]
        label = f"{name}, log10" if one.by_ratio else name
        axes.append({"label": label, "values": [log10(v) if one.by_ratio else v for v in column]})
    axes.append({"label": METRICS[metric], "values": rounded(ends)})
    top = min(max(ends), WORST * min(ends)) if min(ends) > 0 else max(ends)
    line = {"color": rounded(ends), "colorscale": "Viridis", "cmin": min(ends), "cmax": top}
    trace = {"type": "parcoords", "dimensions": axes, "line": line | {"showscale": True}}
    note = "Drag along an axis to keep only the trials that pass there."
    layout = {"margin": {"l": 60, "r": 60, "t": 50, "b": 30}}
    return [Figure("Settings and result together", [trace], note, layout)]


def cost(found: list[Result], metric: str) -> Figure:
    """What a better metric costs in bytes."""
    traces = [
        _points(state, [(r.bytes_sent, r) for r in found if r.state == state])
        for state in ("finished",)
    ]
    layout = _axes("bytes sent by all workers", METRICS[metric])
    layout["xaxis"]["exponentformat"] = "SI"
    return Figure(f"{METRICS[metric]} against bytes", traces, "Finished trials.", layout)


def _points(name: str, placed: list[tuple[Any, Result]]) -> dict[str, Any]:
    shown = [(x, result) for x, result in placed if x is not None and result.metric is not None]
    trace = {"type": "scatter", "mode": "markers", "name": name, "x": [x for x, _ in shown]}
    trace["y"] = rounded(result.metric for _, result in shown)
    return trace | {"text": [result.trial for _, result in shown]}


def _axes(x: str, y: str) -> dict[str, Any]:
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    return axes | {"hovermode": "closest"}


def write_report(
    path: Path,
    found: list[Result],
    space: dict[str, Range],
    metric: str,
    shares: dict[str, float],
    line: str,
) -> None:
    """Write the page; `line` is the command line of the best trial."""
    cells = as_table(ranked(found), metric)
    few = "" if shares else paragraph("Too few trials have finished to say what mattered.")
    sections = [
        Section("Trials, best first", [table(cells[0], cells[1:]), few]),
        Section("What mattered", [*importance(shares), *parallel(found, space, metric)]),
        Section("Each setting alone", slices(found, space, metric)),
        Section("On the way", [history(found, metric), cost(found, metric)]),
    ]
    best = paragraph(f"The best so far: {line}") if line else paragraph("None has finished yet.")
    write_page(path, f"{path.parent.resolve().name}: search of settings", best, sections)
