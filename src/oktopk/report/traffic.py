"""Figures of where the bytes went: by stage of the exchange, by message, and in all."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from typing import Any
from zlib import crc32

from oktopk.report.curves import line, over_steps, with_phases
from oktopk.report.downsample import Columns, number
from oktopk.report.page import Figure, rounded
from oktopk.runlog.reader import Entry, Record


def traffic(record: Record, steps: Columns) -> list[Figure]:
    """Bytes of rank 0 by step and stage, message sizes, and the sum against dense."""
    return [_by_stage(record, steps), _whole(record, steps), *_messages(record)]


def _by_stage(record: Record, steps: Columns) -> Figure:
    stages = sorted({stage for entry in record.steps for stage in entry.get("stages") or {}})
    traces = [
        {"type": "bar", "name": stage, "x": steps.steps, "marker": _colour(stage)}
        | {"y": rounded(steps.means(_sent(entry, stage) for entry in record.steps))}
        for stage in stages
    ]
    dense = line("a dense allreduce", steps.steps, steps.mean("bytes_dense"), line={"dash": "dot"})
    layout = over_steps("bytes", barmode="stack", bargap=0)
    layout["yaxis"] |= {"exponentformat": "SI"}
    note = "Sent by rank 0, headers included. Double-click a name to see one stage alone."
    title = "Bytes of each step, by stage of the exchange"
    return Figure(title, [*traces, dense], note, with_phases(layout, record))


# a stage has the same colour in every figure
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
# for stages that are not among them
OTHER_COLOURS = ("#9aa4b0", "#7a5c46", "#5b6fa8", "#c9a9d6", "#2f6f73", "#d9b44a")


def _colour(stage: str) -> dict[str, str]:
    """By its name, so that it is the same in every figure and every report."""
    return {
        "color": COLOURS.get(stage) or OTHER_COLOURS[crc32(stage.encode()) % len(OTHER_COLOURS)]
    }


def _sent(entry: Entry, stage: str) -> float:
    found = (entry.get("stages") or {}).get(stage) or {}
    return float((found.get("payload_sent") or 0) + (found.get("header_sent") or 0))


def _whole(record: Record, steps: Columns) -> Figure:
    sums = {
        name: steps.total(number(entry, field) for entry in record.steps)
        for name, field in {"sent": "bytes_sent", "a dense run": "bytes_dense"}.items()
    }
    traces = [line(name, steps.steps, list(values)) for name, values in sums.items()]
    layout = over_steps("bytes")
    layout["yaxis"] |= {"exponentformat": "SI"}
    return Figure("Bytes since the beginning", traces, "Of rank 0.", with_phases(layout, record))


def _messages(record: Record) -> list[Figure]:
    counts = {stage: sizes for stage, sizes in message_counts(record).items() if sizes}
    if not counts:  # alone, a rank sends none
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


def message_counts(record: Record) -> dict[str, Counter[int]]:
    """Messages by stage and bit length: the last count of every part of a run that was resumed."""
    began = [entry["step"] for entry in record.of("run")]
    last = {bisect(began, entry["step"]): entry for entry in record.of("messages")}
    counts: dict[str, Counter[int]] = {}
    for entry in last.values():
        for stage, sizes in entry["sent"].items():
            found = {int(length): int(count) for length, count in sizes.items()}
            counts.setdefault(stage, Counter()).update(found)
    return counts
