# SPDX-License-Identifier: Apache-2.0
"""Figures of the bytes sent: by stage of the exchange, by message size, and in total."""

from __future__ import annotations

import statistics
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from typing import Any

from oktopk.report.colours import colour_of_stage, transparent
from oktopk.report.curves import colour, line, over_steps, with_phases
from oktopk.report.downsample import FEW_POINTS, Windows, downsample
from oktopk.report.page import Figure
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import MessagesRecord, RunRecord, StepRecord
from oktopk.utils.units import format_bytes


def traffic(runlog: RunLog, steps: Windows) -> list[Figure]:
    """Bytes of rank 0 by step and stage, message sizes, and the total compared with dense."""
    return [_cumulative(runlog, steps), _by_stage(runlog), *_messages(runlog)]


MAX_TICKS = 6
"""Sizes that are named on an axis: more of them overlap on a phone."""

NORMAL_STAGES = (
    "split and gather have most of the bytes; thresholds, counts and bounds are a few percent. "
    "With other methods there are other stages."
)
NORMAL_MESSAGES = (
    "there are two groups: small messages with counts and sizes, and large ones with entries."
)


def _by_stage(runlog: RunLog) -> Figure:
    """Bytes of the sparse steps, or of all if none is: beside a dense step they would be flat."""
    sparse = [step for step in runlog.steps if step.phase == "sparse"]
    records = sparse or runlog.steps
    steps = downsample(records, FEW_POINTS)
    stages = sorted({stage for step in records for stage in step.stages or {}})
    traces = [
        line(stage, steps.steps, steps.mean_of(_sent(step, stage) for step in records))
        | _area(colour_of_stage(stage))
        for stage in stages
    ]
    layout = over_steps("bytes")
    layout["yaxis"] |= {"exponentformat": "SI", "rangemode": "tozero"}
    what = "sparse step" if sparse else "step"
    title = f"Bytes of a {what}, by stage of the exchange"
    return Figure(title, traces, _by_stage_note(records, bool(sparse)), layout, NORMAL_STAGES)


def _area(colour: str) -> dict[str, Any]:
    """The looks of a stacked trace with steps."""
    edge = {"shape": "hv", "width": 0.5, "color": colour}
    filled = {"stackgroup": "stages", "fillcolor": transparent(colour, 0.75)}
    return {"mode": "lines", "line": edge, "marker": {"color": colour}} | filled


def _by_stage_note(records: Sequence[StepRecord], sparse: bool) -> str:
    note = "Sent by rank 0, headers included. Double-click a name to see one stage alone."
    sent = statistics.median(step.bytes_sent for step in records)
    dense = statistics.median(step.bytes_dense for step in records)
    if not sparse or not sent:
        return note
    return f"{note} A dense step sends {format_bytes(dense)}, {dense / sent:.0f} times the median."


def _sent(step: StepRecord, stage: str) -> float:
    traffic = (step.stages or {}).get(stage)
    return float(traffic.sent) if traffic else 0.0


def _cumulative(runlog: RunLog, steps: Windows) -> Figure:
    fields = {"a dense run": ("bytes_dense", "dense"), "sent": ("bytes_sent", "sparse")}
    traces = [
        line(name, steps.steps, [*steps.cumulative(field)], **colour(thing))
        for name, (field, thing) in fields.items()
    ]
    layout = over_steps("bytes")
    layout["yaxis"] |= {"exponentformat": "SI"}
    return Figure("Bytes since the beginning", traces, "Of rank 0.", with_phases(layout, runlog))


def _messages(runlog: RunLog) -> list[Figure]:
    counts = {stage: sizes for stage, sizes in message_counts(runlog).items() if sizes}
    if not counts:  # a single rank sends none
        return []
    bits = sorted({length for sizes in counts.values() for length in sizes})
    lengths = list(range(bits[0], bits[-1] + 1))
    traces = [
        {"type": "bar", "name": stage, "x": lengths, "marker": {"color": colour_of_stage(stage)}}
        | {"y": [sizes.get(length, 0) for length in lengths]}
        for stage, sizes in sorted(counts.items())
    ]
    named = lengths[:: -(-len(lengths) // MAX_TICKS)]
    axis = {"title": {"text": "size, at most"}, "tickmode": "array", "tickvals": named}
    axis |= {"ticktext": [_binary(2**length) for length in named]}
    layout = {"barmode": "stack", "xaxis": axis, "yaxis": {"title": {"text": "messages"}}}
    note = "Messages of rank 0 by size and stage, up to the last epoch that ended."
    return [Figure("Message sizes", traces, note, layout, NORMAL_MESSAGES)]


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
