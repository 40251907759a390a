"""Where the time of a step went: figures and tables, of rank 0 and of every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from oktopk.report.curves import line, over_steps, with_phases
from oktopk.report.downsample import Columns, number
from oktopk.report.page import (
    Block,
    Figure,
    rounded,
    table,
)
from oktopk.runlog.reader import (
    OVERLAPPED,
    PARTS,
    Entry,
    Record,
)
from oktopk.stats import PHASES

OWN = ("data", "forward", "backward", "optimizer")
"""What a rank does by itself: nobody waits in it."""


def times(record: Record, steps: Columns) -> list[Block]:
    """The stack of a step's parts, a table of their percentiles, and the ranks side by side."""
    known = [part for part in PARTS if record.steps[-1].get(part) is not None]
    stacked = [
        line(part, steps.steps, _milliseconds(steps, part), stackgroup="step", mode="lines")
        for part in known
    ]
    beside = [
        line(f"{part} (meanwhile)", steps.steps, _milliseconds(steps, part), visible="legendonly")
        for part in OVERLAPPED
        if record.steps[-1].get(part) is not None
    ]
    note = (
        "Of rank 0, one upon the other: exposed is what was waited for the exchange. Select, "
        "exchange and scatter go on during backward; click their names to see them."
    )
    layout = with_phases(over_steps("ms"), record)
    whole = [number(entry, "whole") * 1e3 for entry in settled(record)]
    if whole and not np.isnan(whole).any():  # a step that compiles must not flatten the others
        layout["yaxis"]["range"] = [0, 1.15 * float(np.percentile(whole, 99))]
    figure = Figure("Where the time of a step goes", [*stacked, *beside], note, layout)
    return [figure, _percentiles(record), *_ranks(record)]


def _milliseconds(steps: Columns, part: str) -> list[float | None]:
    return [None if value is None else value * 1e3 for value in steps.mean(part)]


def settled(record: Record) -> list[Entry]:
    """Steps without those that compile and connect: the first of each phase and each part."""
    begun = {entry["step"] for entry in record.of("run")}
    pairs = zip(record.steps, [{}, *record.steps], strict=False)
    first = begun | {e["step"] for e, last in pairs if e["phase"] != last.get("phase")}
    return [entry for entry in record.steps if entry["step"] not in first]


def _percentiles(record: Record) -> str:
    rows = []
    steps = settled(record)
    for phase in PHASES:
        entries = [entry for entry in steps if entry["phase"] == phase]
        for part in (*PARTS, "whole", *OVERLAPPED):
            values = np.array([number(entry, part) for entry in entries]) * 1e3
            values = values[~np.isnan(values)]
            if len(values):
                found = [values.mean(), *np.percentile(values, (50, 90, 99)), values.max()]
                name = f"{part} (meanwhile)" if part in OVERLAPPED else part
                rows.append([f"{phase}: {name}", *(f"{value:.1f}" for value in found)])
    note = "Milliseconds of rank 0's steps, by phase, without the first of each, which compiles."
    return table(["part", "mean", "median", "90 %", "99 %", "most"], rows, note)


def _ranks(record: Record) -> list[Block]:
    means = rank_means(record)
    if not means:
        return []
    names = [f"rank {rank}" for rank in range(len(means))]
    traces: list[dict[str, Any]] = [
        {"type": "bar", "name": part, "x": names}
        | {"y": rounded((own.get(part) or 0.0) * 1e3 for own in means)}
        for part in PARTS
    ]
    slowest, ahead = slowest_rank(means)
    note = "Mean milliseconds of a step, the first left out."
    if len(means) > 1:
        note += (
            f" The slowest is rank {slowest}: its own work takes {ahead * 1e3:.0f} ms more than "
            "the mean of the others, which wait for it in exposed."
        )
    layout = {"barmode": "stack", "yaxis": {"title": {"text": "ms"}}}
    return [Figure("Every rank's time", traces, note, layout)]


def rank_means(record: Record) -> list[dict[str, float]]:
    """Mean seconds of each part by rank; empty when none were written.

    A resumed run may have another number of ranks: those of its last part count.
    """
    entries = [entry for entry in record.of("ranks") if entry["step"] > 0 and entry["steps"] > 0]
    if not entries:
        return []
    size = len(entries[-1]["seconds"])
    entries = [entry for entry in entries if len(entry["seconds"]) == size]
    steps = sum(entry["steps"] for entry in entries)
    return [
        {
            part: sum((e["seconds"][rank].get(part) or 0.0) * e["steps"] for e in entries) / steps
            for part in entries[-1]["seconds"][rank]
        }
        for rank in range(size)
    ]


def slowest_rank(means: list[dict[str, float]]) -> tuple[int, float]:
    """The rank with the most work of its own, and the seconds by which it exceeds the others."""
    own = [sum(mean.get(part) or 0.0 for part in OWN) for mean in means]
    slowest = int(np.argmax(own))
    others = own[:slowest] + own[slowest + 1 :]
    return slowest, own[slowest] - (sum(others) / len(others) if others else 0.0)
