# SPDX-License-Identifier: Apache-2.0
"""The trials of a sweep as rows, best first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oktopk.compare.results import row
from oktopk.runlog.reader import read_runlog
from oktopk.sweep.study import values
from oktopk.train.tasks.base import Metric
from oktopk.utils.units import format_bytes, format_metric

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One trial. Bytes are those of all ranks."""

    trial: str
    state: str
    metric: float | None
    """The metric of the last validation, also if the trial did not finish."""

    values: dict[str, Any]
    steps: int
    bytes_sent: int
    ratio: float | None
    minutes: float


def results(folder: Path, metric: Metric, trials: dict[str, FrozenTrial]) -> list[Result]:
    """All trials in the order they began."""
    found = []
    for name, trial in sorted(trials.items()):
        run = row(read_runlog(folder / name))
        found.append(
            Result(
                trial=name,
                state=STATES.get(trial.state.name, "half-way"),
                metric=run.metrics.get(metric.name),
                values=values(trial.params),
                steps=run.steps,
                bytes_sent=run.bytes_sent,
                ratio=run.ratio,
                minutes=run.minutes,
            )
        )
    return found


def ranked(found: Iterable[Result], metric: Metric) -> list[Result]:
    """Finished trials by their metric, the best first, then the others."""
    sign = -1.0 if metric.higher_is_better else 1.0

    def rank(result: Result) -> tuple[bool, float]:
        value = float("inf") if result.metric is None else sign * result.metric
        return result.state != "finished", value

    return sorted(found, key=rank)


def best(found: Iterable[Result], metric: Metric) -> Result | None:
    """The finished trial with the best metric; None when none has finished."""
    first = next(iter(ranked(found, metric)), None)
    return first if first is not None and first.state == "finished" else None


def as_table(found: list[Result], metric: Metric) -> list[list[str]]:
    """Headings and cells."""
    names = list(dict.fromkeys(name for result in found for name in result.values))
    head = ["trial", "state", metric.label, *names, "steps", "sent", "ratio", "minutes"]
    return [head, *(_cells(result, names) for result in found)]


def _cells(result: Result, names: list[str]) -> list[str]:
    return [
        result.trial,
        result.state,
        "-" if result.metric is None else format_metric(result.metric),
        *(f"{result.values[name]:g}" if name in result.values else "-" for name in names),
        str(result.steps),
        format_bytes(result.bytes_sent),
        "-" if result.ratio is None else f"{result.ratio:.1f}",
        f"{result.minutes:.1f}",
    ]


def as_plain(found: list[Result]) -> list[dict[str, Any]]:
    """The results as plain values, for JSON."""
    return [asdict(result) for result in found]
