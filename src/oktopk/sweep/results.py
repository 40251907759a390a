"""The trials of a sweep as rows, best first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oktopk.compare.results import METRICS, row
from oktopk.runlog.reader import read_runlog
from oktopk.sweep.study import values
from oktopk.utils.units import format_bytes

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


def results(folder: Path, metric: str, trials: dict[str, FrozenTrial]) -> list[Result]:
    """All trials in the order they began."""
    found = []
    for name, trial in sorted(trials.items()):
        run = row(read_runlog(folder / name), metric, None)
        found.append(
            Result(
                trial=name,
                state=STATES.get(trial.state.name, "half-way"),
                metric=getattr(run, metric),
                values=values(trial.params),
                steps=run.steps,
                bytes_sent=run.bytes_sent,
                ratio=run.ratio,
                minutes=run.minutes,
            )
        )
    return found


def ranked(found: Iterable[Result]) -> list[Result]:
    """Finished trials by their metric, then the others."""
    return sorted(found, key=_rank)


def _rank(result: Result) -> tuple[bool, float]:
    unknown = float("inf")
    return result.state != "finished", unknown if result.metric is None else result.metric


def best(found: Iterable[Result]) -> Result | None:
    """The finished trial with the lowest metric; None when none has finished."""
    first = next(iter(ranked(found)), None)
    return first if first is not None and first.state == "finished" else None


def as_table(found: list[Result], metric: str) -> list[list[str]]:
    """Headings and cells."""
    names = list(dict.fromkeys(name for result in found for name in result.values))
    head = ["trial", "state", METRICS[metric], *names, "steps", "sent", "ratio", "minutes"]
    return [head, *(_cells(result, names) for result in found)]


def _cells(result: Result, names: list[str]) -> list[str]:
    return [
        result.trial,
        result.state,
        "-" if result.metric is None else f"{result.metric:.3f}",
        *(f"{result.values[name]:g}" if name in result.values else "-" for name in names),
        str(result.steps),
        format_bytes(result.bytes_sent),
        "-" if result.ratio is None else f"{result.ratio:.1f}",
        f"{result.minutes:.1f}",
    ]


def as_plain(found: list[Result]) -> list[dict[str, Any]]:
    """The results as plain values, for JSON."""
    return [asdict(result) for result in found]
