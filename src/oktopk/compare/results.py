"""The results of runs as rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from oktopk.runlog.aggregates import estimated_totals, steady_steps
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import ProbeRecord
from oktopk.utils.units import format_bytes

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
    """The metric minus that of the dense run with the same seed."""

    xi: float | None
    """Mean over the probes of the distance between result and exact top k; None without probes."""

    bytes_sent: int
    ratio: float | None
    """Bytes of a dense run divided by the bytes sent."""

    sparse_ratio: float | None
    ms_per_step: float | None
    """The median of `steady_steps`; None when there are none."""

    minutes: float


def row(runlog: RunLog, metric: str, dense: RunLog | None) -> Row:
    """The row of a run, finished or not."""
    last = runlog.validated[-1] if runlog.validated else None
    totals = estimated_totals(runlog)
    whole, sparse = totals.whole, totals["sparse"]
    durations = [step.whole for step in steady_steps(runlog) if step.whole is not None]
    return Row(
        setting=runlog.directory.name,
        state=runlog.end.how if runlog.end else "unfinished",
        steps=whole.steps,
        **{name: getattr(last, name, None) for name in METRICS},
        to_dense=_difference(runlog, dense, metric),
        xi=_mean([probe.xi for probe in runlog.of(ProbeRecord) if probe.xi is not None]),
        bytes_sent=whole.bytes_sent,
        ratio=_ratio(whole.bytes_dense, whole.bytes_sent),
        sparse_ratio=_ratio(sparse.bytes_dense, sparse.bytes_sent),
        ms_per_step=1e3 * median(durations) if durations else None,
        minutes=whole.microseconds / 6e7,
    )


def _difference(runlog: RunLog, dense: RunLog | None, metric: str) -> float | None:
    if dense is None or dense is runlog or not (runlog.validated and dense.validated):
        return None
    mine, other = (getattr(run.validated[-1], metric) for run in (runlog, dense))
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
    "bytes_sent": ("sent", format_bytes),
    "ratio": ("ratio", _format(".1f")),
    "sparse_ratio": ("ratio, sparse phase", _format(".1f")),
    "ms_per_step": ("ms/step, median", _format(".0f")),
    "minutes": ("minutes", _format(".1f")),
}
"""Columns of the table: the heading, and how a value is formatted."""
OPTIONAL = ("to_dense", "xi")


def as_table(rows: list[Row]) -> list[list[str]]:
    """Headings and cells. Optional columns without values are left out, and so is the state if all
    runs have finished."""
    values = [asdict(row) for row in rows]
    empty = {name for name in OPTIONAL if all(row[name] is None for row in values)}
    if all(row.state == "finished" for row in rows):
        empty.add("state")
    columns = {name: column for name, column in SHOWN.items() if name not in empty}
    cells = [[write(row[name]) for name, (_, write) in columns.items()] for row in values]
    return [[heading for heading, _ in columns.values()], *cells]
