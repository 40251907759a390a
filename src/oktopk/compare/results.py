"""What the runs of a comparison came to: one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from oktopk.report.times import settled
from oktopk.runlog.reader import Entry, Record
from oktopk.stats import PHASES
from oktopk.utils.units import size

METRICS = {"wer": "WER", "cer": "CER", "val_loss": "validation loss"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run. Bytes are those of all ranks; minutes are those of steps, without validation."""

    setting: str
    state: str
    """finished, stopped, failed, or unfinished when it was killed."""

    steps: int
    wer: float | None
    cer: float | None
    val_loss: float | None
    to_dense: float | None
    """The metric less that of the dense run with the same seed."""

    xi: float | None
    """Mean over the probes, where there were any: distance of the results from the true top k."""

    bytes_sent: int
    ratio: float | None
    """Bytes of a dense run over those sent."""

    sparse_ratio: float | None
    ms_per_step: float | None
    """The median of `settled` steps; None where there are none."""

    minutes: float


def row(record: Record, metric: str, dense: Record | None) -> Row:
    """Sum up a run, finished or not."""
    last = record.validated[-1] if record.validated else {}
    sums = totals(record)
    steps = sum(part["steps"] for part in sums.values())
    seconds = sum(part["microseconds"] for part in sums.values()) / 1e6
    sent = {phase: part["bytes_sent"] for phase, part in sums.items()}
    as_dense = {phase: part["bytes_dense"] for phase, part in sums.items()}
    whole = [entry["whole"] for entry in settled(record) if entry.get("whole") is not None]
    return Row(
        setting=record.folder.name,
        state=record.end["how"] if record.end else "unfinished",
        steps=steps,
        **{name: last.get(name) for name in METRICS},
        to_dense=_difference(record, dense, metric),
        xi=_mean([entry["xi"] for entry in record.of("probe") if entry.get("xi") is not None]),
        bytes_sent=sum(sent.values()),
        ratio=_ratio(sum(as_dense.values()), sum(sent.values())),
        sparse_ratio=_ratio(as_dense["sparse"], sent["sparse"]),
        ms_per_step=1e3 * median(whole) if whole else None,
        minutes=seconds / 60,
    )


def totals(record: Record) -> dict[str, Entry]:
    """Sums by phase over all ranks; of a run that did not finish, rank 0's times the ranks."""
    if record.end and record.end.get("totals"):
        nothing = dict.fromkeys(("steps", "microseconds", "bytes_sent", "bytes_dense"), 0)
        return {phase: nothing | record.end["totals"].get(phase, {}) for phase in PHASES}
    size = record.opening.get("size") or 1
    names = {"bytes_sent": size, "bytes_dense": size}
    found = {}
    for phase in PHASES:
        steps = [entry for entry in record.steps if entry["phase"] == phase]
        found[phase] = {name: n * sum(entry[name] for entry in steps) for name, n in names.items()}
        found[phase] |= {"steps": len(steps)}
        found[phase] |= {"microseconds": round(1e6 * sum(map(_seconds, steps)))}
    return found


def bytes_so_far(record: Record) -> list[float]:
    """Bytes of all ranks up to each step.

    Only rank 0's are known by the step. Ranks may differ (in a tree they do), but a rank's share
    of a phase hardly changes: so they are scaled to what all sent in that phase.
    """
    whole, own = totals(record), dict.fromkeys(PHASES, 0)
    for entry in record.steps:
        own[entry["phase"]] += entry["bytes_sent"]
    scale = {phase: whole[phase]["bytes_sent"] / own[phase] for phase in PHASES if own[phase]}
    return list(
        accumulate(entry["bytes_sent"] * scale.get(entry["phase"], 0) for entry in record.steps)
    )


def minutes_so_far(record: Record) -> list[float]:
    """Minutes of steps up to each step."""
    return [seconds / 60 for seconds in accumulate(map(_seconds, record.steps))]


def _seconds(entry: Entry) -> float:
    return entry.get("whole") or 0.0


def _difference(record: Record, dense: Record | None, metric: str) -> float | None:
    if dense is None or dense is record or not (record.validated and dense.validated):
        return None
    mine, other = (run.validated[-1].get(metric) for run in (record, dense))
    return mine - other if mine is not None and other is not None else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(dense: int, sent: int) -> float | None:
    return dense / sent if sent else None


def _format(how: str) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else format(value, how)


SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "setting": ("setting", str),
    "state": ("state", str),
    "wer": ("WER", _format(".3f")),
    "cer": ("CER", _format(".3f")),
    "val_loss": ("validation loss", _format(".3f")),
    "to_dense": ("to dense", _format("+.3f")),
    "xi": ("xi", _format(".3f")),
    "bytes_sent": ("sent", size),
    "ratio": ("ratio", _format(".1f")),
    "sparse_ratio": ("ratio, sparse phase", _format(".1f")),
    "ms_per_step": ("ms/step, median", _format(".0f")),
    "minutes": ("minutes", _format(".1f")),
}
"""Columns of the table: heading and how a value is written."""
OPTIONAL = ("to_dense", "xi")


def as_table(rows: list[Row]) -> list[list[str]]:
    """Headings and cells, without columns that nobody fills, or the state when all is well."""
    values = [asdict(row) for row in rows]
    empty = {name for name in OPTIONAL if all(row[name] is None for row in values)}
    if all(row.state == "finished" for row in rows):
        empty.add("state")
    columns = {name: column for name, column in SHOWN.items() if name not in empty}
    cells = [[write(row[name]) for name, (_, write) in columns.items()] for row in values]
    return [[heading for heading, _ in columns.values()], *cells]
