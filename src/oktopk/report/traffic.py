# SPDX-License-Identifier: Apache-2.0
"""Figures of the bytes sent: by stage of the exchange, by message size, and in total."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from typing import Any
from zlib import crc32

from oktopk.report.curves import line, over_steps, with_phases
from oktopk.report.downsample import Windows
from oktopk.report.page import Figure, rounded
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import MessagesRecord, RunRecord, StepRecord


def traffic(runlog: RunLog, steps: Windows) -> list[Figure]:
    """Bytes of rank 0 by step and stage, message sizes, and the total compared with dense."""
    return [_by_stage(runlog, steps), _cumulative(runlog, steps), *_messages(runlog)]


def _by_stage(runlog: RunLog, steps: Windows) -> Figure:
    stages = sorted({stage for step in runlog.steps for stage in step.stages or {}})
    traces = [
        {"type": "bar", "name": stage, "x": steps.steps, "marker": _colour(stage)}
        | {"y": rounded(steps.mean_of(_sent(step, stage) for step in runlog.steps))}
        for stage in stages
    ]
    dense = line("a dense allreduce", steps.steps, steps.mean("bytes_dense"), line={"dash": "dot"})
    layout = over_steps("bytes", barmode="stack", bargap=0)
    layout["yaxis"] |= {"exponentformat": "SI"}
    note = "Sent by rank 0, headers included. Double-click a name to see one stage alone."
    title = "Bytes of each step, by stage of the exchange"
    return Figure(title, [*traces, dense], note, with_phases(layout, runlog))


# by stage, so that it has the same colour in every figure
COLOURS = {
    "dense": "#2a9d6f",
    "split": "#3b82d6",
    "gather": "#e08214",
    "threshold": "#8c6bd1",
    "counts": "#b0892b",
    "bounds": "#4db6c9",
    "reduce": "#c2439a",
    "broadcast": "#6f8f3f",
    "balance": "#d6554c",
}
# for other stages
OTHER_COLOURS = ("#9aa4b0", "#7a5c46", "#5b6fa8", "#c9a9d6", "#2f6f73", "#d9b44a")


def _colour(stage: str) -> dict[str, str]:
    """The colour of a stage. A hash of the name chooses it for stages without one of their own."""
    return {
        "color": COLOURS.get(stage) or OTHER_COLOURS[crc32(stage.encode()) % len(OTHER_COLOURS)]
    }


def _sent(step: StepRecord, stage: str) -> float:
    traffic = (step.stages or {}).get(stage)
    return float(traffic.sent) if traffic else 0.0


def _cumulative(runlog: RunLog, steps: Windows) -> Figure:
    fields = {"sent": "bytes_sent", "a dense run": "bytes_dense"}
    traces = [line(name, steps.steps, [*steps.cumulative(field)]) for name, field in fields.items()]
    layout = over_steps("bytes")
    layout["yaxis"] |= {"exponentformat": "SI"}
    return Figure("Bytes since the beginning", traces, "Of rank 0.", with_phases(layout, runlog))


def _messages(runlog: RunLog) -> list[Figure]:
    counts = {stage: sizes for stage, sizes in message_counts(runlog).items() if sizes}
    if not counts:  # a single rank sends none
        return []
    bits = sorted({length for sizes in counts.values() for length in sizes})
    names = [f"up to {_binary(2**length)}" for length in range(bits[0], bits[-1] + 1)]
    traces = [
        {"type": "bar", "name": stage, "x": names, "marker": _colour(stage)}
        | {"y": [sizes.get(length, 0) for length in range(bits[0], bits[-1] + 1)]}
        for stage, sizes in sorted(counts.items())
    ]
    layout: dict[str, Any] = {"barmode": "stack", "yaxis": {"title": {"text": "messages"}}}
    note = "Messages of rank 0 by size and stage, up to the last epoch that ended."
    return [Figure("Message sizes", traces, note, layout)]


def _binary(num_bytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes} {unit}"
        num_bytes //= 1024
    return f"{num_bytes} GiB"


def message_counts(runlog: RunLog) -> dict[str, Counter[int]]:
    """Number of messages by stage and by the bit length of their size.

    Counts start over when a run is resumed, so the last count before each resume is added up.
    """
    began = [run.step for run in runlog.of(RunRecord)]
    last = {bisect(began, record.step): record for record in runlog.of(MessagesRecord)}
    counts: dict[str, Counter[int]] = {}
    for record in last.values():
        for stage, sizes in record.sent.items():
            counts.setdefault(stage, Counter()).update(sizes)
    return counts
