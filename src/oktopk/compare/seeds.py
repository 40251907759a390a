# SPDX-License-Identifier: Apache-2.0
"""Several seeds of one setting as one row: their mean, and how far they lie apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

from oktopk.compare.networks import without_seed
from oktopk.compare.results import Row
from oktopk.compare.verdict import reference_of
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import MetricInfo
from oktopk.utils.units import format_bytes, format_duration, format_metric

HEADINGS = ("setting", "seeds", "reached", "to target", "speed-up", "sent to target")
RACE = HEADINGS[2:]
"""Columns of a race, which are left out if no run has reached a target."""


def seeds_table(
    runlogs: Sequence[RunLog], rows: Sequence[Row], metric: MetricInfo
) -> list[list[str]]:
    """Headings and a row of cells for each setting; empty unless one has several seeds.

    Times and bytes until the target are means of the seeds that reached it. The speed-up is the
    mean time of the dense runs over that of these runs, if all of both have reached the target.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for i, runlog in enumerate(runlogs):
        groups[setting_of(runlog)].append(i)
    if all(len(group) < 2 for group in groups.values()):
        return []
    race = any(row.arrival for row in rows)
    heads = [head for head in HEADINGS if race or head not in RACE]
    cells = [[*heads, metric.label, "lowest to highest"]]
    for setting, group in groups.items():
        found = {"setting": setting, "seeds": str(len(group))} | _arrivals(runlogs, rows, group)
        values = [v for i in group if (v := rows[i].metrics.get(metric.name)) is not None]
        spread = f"{format_metric(min(values))} to {format_metric(max(values))}" if values else "-"
        middle = format_metric(mean(values)) if values else "-"
        cells.append([*(found[head] for head in heads), middle, spread])
    return cells


def setting_of(runlog: RunLog) -> str:
    """The name of a run without its seed."""
    return without_seed(runlog.directory.name, runlog.config.get("seed", 0))


def _arrivals(runlogs: Sequence[RunLog], rows: Sequence[Row], group: list[int]) -> dict[str, str]:
    """When the seeds of a setting reached the target, on average."""
    arrived = [arrival for i in group if (arrival := rows[i].arrival)]
    references = {reference_of(runlogs, runlogs[i]) for i in group}
    dense = [None if i is None else rows[i].arrival for i in references]
    speedup = "-"
    if len(arrived) == len(group) and not references & set(group) and all(dense):
        times = mean(one.seconds for one in dense if one), mean(one.seconds for one in arrived)
        speedup = f"{times[0] / times[1]:.1f}" if times[1] else "-"
    return {
        "reached": f"{len(arrived)} of {len(group)}",
        "to target": format_duration(mean(one.seconds for one in arrived)) if arrived else "-",
        "speed-up": speedup,
        "sent to target": format_bytes(mean(one.bytes_sent for one in arrived)) if arrived else "-",
    }
