"""A table and figures of records: every setting compared with dense, at equal steps and seeds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from record import WORKERS, Key, Record

Curve = list[tuple[int, float, float]]
Group = tuple[str, str]
"""A task, with its workers and steps if they are not the default, and an optimizer. Settings are
compared within a group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One setting, the mean of its seeds."""

    setting: str
    seeds: int
    final: float
    spread: float
    """Largest minus smallest of the seeds."""

    distance: float
    """Relative difference of the metric to dense; positive is worse."""

    pace: float | None
    """Steps that dense takes to its metric after three quarters of the run, over the steps that
    this setting takes; None: it does not get there."""

    caught_up: float | None
    """Steps to the final metric of dense; None: it does not get there."""

    share: float
    curve: Curve


def grouped(records: list[Record]) -> dict[Group, dict[str, list[Record]]]:
    groups: dict[Group, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        groups[_task(record.key), record.key.optimizer][record.key.setting].append(record)
    return groups


def _task(key: Key) -> str:
    """The name of the comparison. Other numbers of steps or workers are separate comparisons."""
    steps = f", {key.steps} steps" if key.steps else ""
    workers = f", {key.workers} workers" if key.workers != WORKERS else ""
    return f"{key.task}{steps}{workers}"


def mean_curve(records: list[Record]) -> Curve:
    return [
        (points[0][0], statistics.mean(p[1] for p in points), statistics.mean(p[2] for p in points))
        for points in zip(*(record.curve for record in records), strict=True)
    ]


def rows(settings: dict[str, list[Record]]) -> list[Row]:
    """A row for each setting, compared with dense over the same seeds, if there is dense."""
    found = []
    for setting, records in settings.items():
        seeds = {record.key.seed for record in records}
        dense = [record for record in settings.get("dense", []) if record.key.seed in seeds]
        known = len(dense) == len(records)
        found.append(_row(setting, records, mean_curve(dense) if known else None))
    return found


def _row(setting: str, records: list[Record], dense: Curve | None) -> Row:
    curve = mean_curve(records)
    ends = [record.curve[-1][1] for record in records]
    sign = -1 if records[0].higher_is_better else 1
    final, goal = curve[-1][1], dense[-1][1] if dense else float("nan")
    return Row(
        setting=setting,
        seeds=len(records),
        final=final,
        spread=max(ends) - min(ends),
        distance=sign * (final - goal) / goal if goal else float("nan"),
        pace=pace(curve, dense, sign) if dense else None,
        caught_up=_reached(_signed(curve, sign), sign * goal),
        share=statistics.mean(record.share for record in records),
        curve=curve,
    )


def pace(curve: Curve, dense: Curve, sign: int) -> float | None:
    """How fast the metric that dense has after three quarters of its steps is reached; dense has 1.

    The first time counts for both. Values between two points are interpolated.
    """
    goal = sign * next(metric for step, metric, _ in dense if step >= 0.75 * dense[-1][0])
    took = [
        _reached([(step, sign * metric) for step, metric, _ in c], goal) for c in (dense, curve)
    ]
    return took[0] / took[1] if took[0] and took[1] else None


def _signed(curve: Curve, sign: int) -> list[tuple[int, float]]:
    """The curve with a sign such that smaller is better."""
    return [(step, sign * metric) for step, metric, _ in curve]


def _reached(curve: list[tuple[int, float]], goal: float) -> float | None:
    before = (0, float("inf"))
    for step, metric in curve:
        if metric <= goal:
            if before[1] == float("inf") or before[1] == metric:
                return step
            along = (before[1] - goal) / (before[1] - metric)
            return before[0] + along * (step - before[0])
        before = (step, metric)
    return None


COLUMNS = (
    *("task", "optimizer", "setting", "seeds", "measure", "final", "spread", "to dense", "pace"),
    *("steps to dense's end", "GB sent", "bytes"),
)


def table(groups: dict[Group, dict[str, list[Record]]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for (task, optimizer), settings in sorted(groups.items()):
        measure = next(iter(settings.values()))[0].measure
        for row in rows(settings):
            paced = "never" if row.pace is None else f"{row.pace:.0%}"
            caught_up = "never" if row.caught_up is None else f"{row.caught_up:.0f}"
            sent = row.curve[-1][2]
            distance = round(row.distance, 3) + 0.0  # avoids -0.0
            lines.append(
                f"| {task} | {optimizer} | {row.setting} | {row.seeds} | {measure} | "
                f"{row.final:.4f} | {row.spread:.4f} | {distance:+.1%} | {paced} | "
                f"{caught_up} | {sent / 1e9:.2f} | {row.share:.1%} |"
            )
    return "\n".join(lines)


def plot(groups: dict[Group, dict[str, list[Record]]], folder: Path) -> list[Path]:
    """Draw a figure for each task and optimizer: the metric over steps, and over bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for (task, optimizer), settings in sorted(groups.items()):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
        for row in rows(settings):
            steps, metrics, sent = zip(*row.curve, strict=True)
            left.plot(steps, metrics, label=row.setting, linewidth=1.4)
            right.plot([b / 1e6 for b in sent], metrics, label=row.setting, linewidth=1.4)
        measure = next(iter(settings.values()))[0].measure
        left.set(xlabel="steps", ylabel=measure, title=f"{task}, {optimizer}")
        right.set(xlabel="megabytes sent by all workers", xscale="log")
        for axes in (left, right):
            axes.grid(alpha=0.3)
        left.legend()
        figure.tight_layout()
        paths.append(folder / f"{task.replace(', ', '-').replace(' ', '')}-{optimizer}.png")
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths
