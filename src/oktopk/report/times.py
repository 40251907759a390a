# SPDX-License-Identifier: Apache-2.0
"""The time of a step by part: figures and tables of rank 0 and of every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from oktopk.report.colours import PARTS, transparent
from oktopk.report.curves import line, over_steps, with_phases
from oktopk.report.downsample import FEW_POINTS, Windows, downsample
from oktopk.report.page import (
    Block,
    Figure,
    folded,
    paragraph,
    rounded,
    table,
)
from oktopk.report.phases import cost_sentences, side_by_side
from oktopk.runlog.aggregates import steady_steps
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import OVERLAPPED_PARTS, STEP_PARTS, RanksRecord, StepRecord
from oktopk.stats import PHASES

OWN_PARTS = ("data", "forward", "backward", "optimizer")
"""Parts in which a rank does not wait for others."""


ABOUT_PARTS = (
    "The parts of a step of rank 0, stacked. Exposed is the time spent waiting for the exchange. "
    "Select, exchange and scatter overlap with backward; click a name to show it."
)


def times(runlog: RunLog) -> list[Block]:
    """Dense and sparse steps side by side, steps over time, percentiles, and all ranks."""
    sentences = [*cost_sentences(runlog), *_first_and_tenth(runlog)]
    blocks: list[Block] = [paragraph(text, "summary") for text in sentences]
    percentiles = folded("Means and percentiles of every part", _percentiles(runlog))
    return [*blocks, *side_by_side(runlog), _over_time(runlog), percentiles, *_ranks(runlog)]


def _first_and_tenth(runlog: RunLog) -> list[str]:
    """The first step beside one by which everything is connected and allocated."""
    seconds = [step.whole for step in runlog.steps if step.step in (0, 9)]
    if len(seconds) != 2 or None in seconds:
        return []
    first, tenth = (1e3 * (whole or 0.0) for whole in seconds)
    return [f"The first step took {first:.0f} ms, and the tenth {tenth:.0f} ms."]


def _over_time(runlog: RunLog) -> Figure:
    """The medians of the parts in windows of steps, as areas: a slow step is not a spike."""
    steps = downsample(runlog.steps, FEW_POINTS)
    last = runlog.steps[-1]
    stacked = [
        line(part, steps.steps, _milliseconds(steps, part), stackgroup="step", **_area(part))
        for part in STEP_PARTS
        if getattr(last, part) is not None
    ]
    overlapped = [
        line(f"{part} (overlapped)", steps.steps, _milliseconds(steps, part), visible="legendonly")
        | {"line": {"color": PARTS[part]}, "marker": {"color": PARTS[part]}}
        for part in OVERLAPPED_PARTS
        if getattr(last, part) is not None
    ]
    width = f" Each point is the median of {steps.width} steps." if steps.width > 1 else ""
    layout = with_phases(over_steps("ms"), runlog)
    layout["yaxis"] |= {"rangemode": "tozero"}
    title = "Where the time of a step goes"
    return Figure(title, [*stacked, *overlapped], f"{ABOUT_PARTS}{width}", layout)


def _area(part: str) -> dict[str, Any]:
    colour = PARTS[part]
    return {
        "mode": "lines",
        "line": {"color": colour, "width": 0.5},
        "fillcolor": transparent(colour, 0.75),
    }


def _milliseconds(steps: Windows, part: str) -> list[float | None]:
    return [None if value is None else value * 1e3 for value in steps.median(part)]


def _column(steps: list[StepRecord], part: str) -> np.ndarray:
    """The milliseconds of a part in each step; NaN where it was not recorded."""
    seconds = [getattr(step, part) for step in steps]
    return np.array([np.nan if value is None else value * 1e3 for value in seconds])


def _percentiles(runlog: RunLog) -> str:
    rows = []
    for phase in PHASES:
        steps = [step for step in steady_steps(runlog) if step.phase == phase]
        for part in (*STEP_PARTS, "whole", *OVERLAPPED_PARTS):
            values = _column(steps, part)
            values = values[~np.isnan(values)]
            if len(values):
                found = [values.mean(), *np.percentile(values, (50, 90, 99)), values.max()]
                name = f"{part} (overlapped)" if part in OVERLAPPED_PARTS else part
                rows.append([f"{phase}: {name}", *(f"{value:.1f}" for value in found)])
    note = (
        "Milliseconds of a step of rank 0 by phase, without the first step of each, which connects."
    )
    return table(["part", "mean", "median", "90 %", "99 %", "most"], rows, note)


def _ranks(runlog: RunLog) -> list[Block]:
    means = rank_means(runlog)
    if not means:
        return []
    names = [f"rank {rank}" for rank in range(len(means))]
    traces: list[dict[str, Any]] = [
        {"type": "bar", "name": part, "x": names, "marker": {"color": PARTS[part]}}
        | {"y": rounded((own.get(part) or 0.0) * 1e3 for own in means)}
        for part in STEP_PARTS
    ]
    slowest, ahead = slowest_rank(means)
    note = "Mean milliseconds of a step, without the first."
    if len(means) > 1:
        note += (
            f" The slowest is rank {slowest}: its own work takes {ahead * 1e3:.0f} ms more than "
            "the mean of the others, which wait for it (exposed)."
        )
    layout = {"barmode": "stack", "yaxis": {"title": {"text": "ms"}}}
    return [Figure("Every rank's time", traces, note, layout)]


def rank_means(runlog: RunLog) -> list[dict[str, float]]:
    """Mean seconds of each part by rank; empty when none were recorded.

    If a resumed run has changed its world size, only the last world size counts.
    """
    records = [r for r in runlog.of(RanksRecord) if r.step > 0 and r.steps > 0]
    if not records:
        return []
    size = len(records[-1].seconds)
    records = [record for record in records if len(record.seconds) == size]
    steps = sum(record.steps for record in records)
    return [
        {
            part: sum((r.seconds[rank].get(part) or 0.0) * r.steps for r in records) / steps
            for part in records[-1].seconds[rank]
        }
        for rank in range(size)
    ]


def slowest_rank(means: list[dict[str, float]]) -> tuple[int, float]:
    """The rank with the most work of its own, and the seconds by which it exceeds the others."""
    own = [sum(mean.get(part) or 0.0 for part in OWN_PARTS) for mean in means]
    slowest = int(np.argmax(own))
    others = own[:slowest] + own[slowest + 1 :]
    return slowest, own[slowest] - (sum(others) / len(others) if others else 0.0)
