# SPDX-License-Identifier: Apache-2.0
"""Several seeds of one setting as one row: their mean, and how far they lie apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from oktopk.compare.networks import without_seed
from oktopk.compare.results import Arrival, Row, compared, or_dash
from oktopk.compare.verdict import reference_of
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import MetricInfo
from oktopk.utils.units import format_bytes, format_duration, format_metric

RACE = ("reached", "to target", "speed-up", "sent to target")
"""Columns of a race, which are left out if there is no target."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """The finished runs of a setting, and their mean as one row."""

    runlog: RunLog
    """The first of the runs, with the name of the setting and without a seed."""

    rows: list[Row]
    row: Row


def setting_of(runlog: RunLog) -> str:
    """The name of a run without its seed."""
    return without_seed(runlog.directory.name, runlog.config.get("seed", 0))


def averaged(runlogs: Sequence[RunLog], rows: Sequence[Row], metric: str) -> list[Averaged]:
    """The settings with finished runs; empty unless one of them has several seeds.

    A setting has reached the target if all its finished runs have, after the mean of their times.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for i, runlog in enumerate(runlogs):
        if rows[i].state == "finished":
            groups[setting_of(runlog)].append(i)
    if all(len(group) < 2 for group in groups.values()):
        return []
    found = [
        Averaged(_unseeded(runlogs[group[0]]), own, _mean_row(setting, own))
        for setting, group in groups.items()
        if (own := [rows[i] for i in group])
    ]
    references = [reference_of([one.runlog for one in found], one.runlog) for one in found]
    return [
        replace(one, row=compared(one.row, None if i is None else found[i].row, metric))
        for one, i in zip(found, references, strict=True)
    ]


def seeds_table(
    settings: Sequence[Averaged], metric: MetricInfo, *, is_race: bool
) -> list[list[str]]:
    """Headings and a row of cells for each setting; empty without settings."""
    if not settings:
        return []
    columns = _columns(metric)
    heads = [head for head in columns if is_race or head not in RACE]
    return [heads, *([columns[head](one) for head in heads] for one in settings)]


def _columns(metric: MetricInfo) -> dict[str, Callable[[Averaged], str]]:
    """By heading: how the cell of a setting is written."""

    def spread(one: Averaged) -> str:
        values = [row.metrics.get(metric.name) for row in one.rows]
        known = [value for value in values if value is not None]
        if len(known) < 2:
            return "-"
        return f"{format_metric(min(known))} to {format_metric(max(known))}"

    return {
        "setting": lambda one: one.row.setting,
        "seeds": lambda one: str(len(one.rows)),
        "reached": lambda one: (
            f"{sum(row.arrival is not None for row in one.rows)} of {len(one.rows)}"
        ),
        "to target": lambda one: or_dash(format_duration)(
            one.row.arrival and one.row.arrival.seconds
        ),
        "speed-up": lambda one: or_dash("{:.1f}".format)(one.row.speedup),
        "sent to target": lambda one: or_dash(format_bytes)(
            one.row.arrival and one.row.arrival.bytes_sent
        ),
        metric.label: lambda one: or_dash(format_metric)(one.row.metrics.get(metric.name)),
        "lowest to highest": spread,
    }


def _unseeded(runlog: RunLog) -> RunLog:
    """The run under the name of its setting. Without seeds, each is compared with the dense one."""
    directory = runlog.directory.with_name(setting_of(runlog))
    return RunLog(directory, runlog.config | {"seed": 0}, runlog.records, runlog.problems)


def _mean_row(setting: str, rows: list[Row]) -> Row:
    """The means of the rows. A metric that one of them lacks has none."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    arrivals = [row.arrival for row in rows if row.arrival is not None]
    return replace(
        rows[0],
        setting=setting,
        metrics={name: _mean_or_none([row.metrics.get(name) for row in rows]) for name in names},
        arrival=_mean_arrival(arrivals) if len(arrivals) == len(rows) else None,
        bytes_sent=round(mean(row.bytes_sent for row in rows)),
        ms_per_step=_mean_or_none([row.ms_per_step for row in rows]),
        minutes=mean(row.minutes for row in rows),
    )


def _mean_arrival(arrivals: list[Arrival]) -> Arrival:
    return Arrival(
        mean(one.seconds for one in arrivals),
        mean(one.bytes_sent for one in arrivals),
        round(mean(one.steps for one in arrivals)),
    )


def _mean_or_none(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None
