# SPDX-License-Identifier: Apache-2.0
"""The report of a sweep: the importance of each setting, and the results of the trials."""

from __future__ import annotations

from itertools import accumulate
from math import log
from pathlib import Path
from typing import Any

from oktopk.report.curves import LOG
from oktopk.report.page import (
    Figure,
    Section,
    paragraph,
    rounded,
    table,
    write_page,
)
from oktopk.sweep.results import Result, as_table, ranked
from oktopk.sweep.space import Range
from oktopk.train.tasks.base import Metric
from oktopk.utils.units import format_metric

AXIS_LIMIT = 3.0
"""Axes and colours end at this multiple of the first quartile of the metric, because a trial that
diverged would compress all others into a corner."""
COLOURS = {"finished": "#3b82d6", "pruned": "#e08214", "half-way": "#8c6bd1", "failed": "#d6554c"}
BEST, OTHERS = (59, 130, 214), (190, 190, 190)
"""RGB colours of the best and the worst lines, visible on dark and light pages."""


def importance(shares: dict[str, float]) -> list[Figure]:
    """The importance of each setting."""
    if not shares:
        return []
    names = sorted(shares, key=shares.__getitem__)
    bars = {"type": "bar", "orientation": "h", "x": rounded(shares[n] for n in names), "y": names}
    note = "The share of the metric's variance that a setting explains by itself (fANOVA)."
    return [Figure("What mattered", [bars], note, {"xaxis": {"tickformat": "~%"}})]


def history(found: list[Result], metric: Metric) -> list[Figure]:
    """The metric of every trial in order, and the best so far."""
    traces = _by_state([(i, result) for i, result in enumerate(found)])
    done = [(i, r.metric) for i, r in enumerate(found) if r.state == "finished"]
    known = [(i, value) for i, value in done if value is not None]
    if known:
        lowest = accumulate((value for _, value in known), max if metric.higher_is_better else min)
        line = {"shape": "hv", "color": "#2a9d6f"}
        best = {"type": "scatter", "mode": "lines", "name": "best so far", "line": line}
        traces.append(best | {"x": [i for i, _ in known], "y": rounded(lowest)})
    return _figure("Trials in order", traces, found, "trial", metric)


def slices(found: list[Result], space: dict[str, Range], metric: Metric) -> list[Figure]:
    """The metric against each setting alone."""
    figures = []
    for name, one in space.items():
        traces = _by_state([(result.values.get(name), result) for result in found])
        scale = LOG if one.by_ratio else {"type": "linear"}
        title = f"{metric.label} against {name}"
        figures += _figure(title, traces, found, name, metric, **scale)
    return figures


def parallel(found: list[Result], space: dict[str, Range], metric: Metric) -> list[Figure]:
    """Parallel coordinates: every trial is a line through its settings and its metric."""
    known = [(r, r.metric) for r in ranked(found, metric) if r.metric is not None]
    if len(known) < 2:
        return []
    low, high = min(value for _, value in known), _top(found)
    names = [f"{name}<br>{one.low:g} to {one.high:g}" for name, one in space.items()]
    names.append(f"{metric.label}<br>{low:.3g} to {high:.3g}")
    traces = []
    for result, value in reversed(known):  # the best is drawn last, above the others
        share = _share(min(value, high), low, high)
        y = [_position(one, result.values[name]) for name, one in space.items()]
        settings = [f"{name} {result.values[name]:g}" for name in space]
        text = "<br>".join([f"{result.trial}, {result.state}", *settings])
        text += f"<br>{metric.label} {format_metric(value)}"
        line = {"color": _between(share), "width": 3 - 2 * share}
        trace = {"type": "scatter", "mode": "lines+markers", "name": result.trial, "line": line}
        trace |= {"x": list(range(len(names))), "y": rounded([*y, share])}
        traces.append(trace | {"text": text, "hoverinfo": "text"})
    ticks = {"tickvals": list(range(len(names))), "ticktext": names, "zeroline": False}
    layout = {"xaxis": ticks, "yaxis": {"visible": False, "range": [-0.05, 1.05]}}
    layout |= {"hovermode": "closest", "showlegend": False}
    note = (
        "Each line is a trial. Every axis goes from the low end of its range at the bottom to the "
    )
    note += "high end; better trials are bluer and wider. Hover to see the values."
    return [Figure("Settings and result together", traces, note, layout)]


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.0


def _position(one: Range, value: float) -> float:
    """The position of a value in its range, from 0 to 1."""
    ends = (value, one.low, one.high)
    return _share(*(log(each) for each in ends)) if one.by_ratio else _share(*ends)


def _between(share: float) -> str:
    mixed = (round(a + share * (b - a)) for a, b in zip(BEST, OTHERS, strict=True))
    return f"rgb({','.join(map(str, mixed))})"


def cost(found: list[Result], metric: Metric) -> list[Figure]:
    """The metric of finished trials against the bytes that they sent."""
    finished = [result for result in found if result.state == "finished"]
    traces = _by_state([(result.bytes_sent, result) for result in finished])
    title = f"{metric.label} against bytes"
    axis = {"exponentformat": "SI"}
    return _figure(title, traces, finished, "bytes sent by all workers", metric, **axis)


def _by_state(placed: list[tuple[Any, Result]]) -> list[dict[str, Any]]:
    """Points of the trials that have an x value and a metric, one trace for each state."""
    shown = [(x, result) for x, result in placed if x is not None and result.metric is not None]
    traces = []
    for state, colour in COLOURS.items():
        own = [(x, result) for x, result in shown if result.state == state]
        if own:
            trace = {"type": "scatter", "mode": "markers", "name": state, "x": [x for x, _ in own]}
            trace |= {"y": rounded(result.metric for _, result in own)}
            trace |= {"text": [result.trial for _, result in own], "marker": {"color": colour}}
            traces.append(trace)
    return traces


def _figure(
    title: str,
    traces: list[dict[str, Any]],
    found: list[Result],
    x: str,
    metric: Metric,
    **axis: Any,
) -> list[Figure]:
    """A figure of the metric over `x`; empty if no trial has a metric."""
    if not traces:
        return []
    values = [result.metric for result in found if result.metric is not None]
    low, high = min(values), _top(found)
    layout: dict[str, Any] = {"hovermode": "closest", "xaxis": {"title": {"text": x}} | axis}
    y: dict[str, Any] = {"title": {"text": metric.label}}
    layout["yaxis"] = y
    above = sum(value > high for value in values)
    if not above:
        return [Figure(title, traces, "", layout)]
    margin = 0.05 * (high - low)
    y["range"] = rounded([low - margin, high + margin])
    note = f"{above} of {len(values)} trials are above {high:.3g} and not shown."
    return [Figure(title, traces, note, layout)]


def _top(found: list[Result]) -> float:
    """The value at which axes and colours end; see `AXIS_LIMIT`."""
    values = sorted(result.metric for result in found if result.metric is not None)
    quarter = values[(len(values) - 1) // 4]
    return min(values[-1], AXIS_LIMIT * quarter) if quarter > 0 else values[-1]


def write_report(
    path: Path,
    found: list[Result],
    space: dict[str, Range],
    metric: Metric,
    shares: dict[str, float],
    line: str,
) -> None:
    """Write the page; `line` is the command that trains with the best settings."""
    cells = as_table(ranked(found, metric), metric)
    few = "" if shares else paragraph("Too few trials have finished to say what mattered.")
    sections = [
        Section("Trials, best first", [table(cells[0], cells[1:]), few]),
        Section("What mattered", [*importance(shares), *parallel(found, space, metric)]),
        Section("Each setting alone", slices(found, space, metric)),
        Section("On the way", [*history(found, metric), *cost(found, metric)]),
    ]
    best = paragraph(f"The best so far: {line}") if line else paragraph("None has finished yet.")
    write_page(path, f"{path.parent.resolve().name}: search of settings", best, sections)
