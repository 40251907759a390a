# SPDX-License-Identifier: Apache-2.0
"""The outcome of a comparison: who reached the target, or metric, bytes and time beside dense."""

from __future__ import annotations

from collections.abc import Sequence

from oktopk.compare.results import Row
from oktopk.compare.seeds import averaged
from oktopk.compare.verdict import network_of, reference_of, verdict
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import MetricInfo
from oktopk.train.target import Target
from oktopk.utils.units import format_metric

FEWER = 1.05
"""Ratios of bytes below it, and above its inverse, are called equal."""


def conclusion(
    runlogs: Sequence[RunLog], rows: Sequence[Row], metric: MetricInfo, target: Target | None
) -> str:
    """The verdict of a race; without a target, how the best run ended beside its dense run.

    With several seeds it is about the means of settings: the best single run may just be lucky.
    """
    if settings := averaged(runlogs, rows, metric.name):
        runlogs = [one.runlog for one in settings]
        rows = [one.row for one in settings]
    said = verdict(runlogs, rows, target) or outcome(runlogs, rows, metric)
    return f"{said} These are means of all seeds." if settings and said else said


def outcome(runlogs: Sequence[RunLog], rows: Sequence[Row], metric: MetricInfo) -> str:
    """The run with the best metric beside its dense run; empty if no run has the metric."""
    finished = [
        (value, i)
        for i, row in enumerate(rows)
        if row.state == "finished" and (value := row.metrics.get(metric.name)) is not None
    ]
    others = [pair for pair in finished if reference_of(runlogs, runlogs[pair[1]]) != pair[1]]
    if not others:
        return ""
    value, best = (max if metric.higher_is_better else min)(others)
    ended = f"{metric.label} {format_metric(value)}{network_of(runlogs)}"
    text = f"{rows[best].setting} ended with {ended}"
    reference = reference_of(runlogs, runlogs[best])
    known = rows[reference].metrics.get(metric.name) if reference is not None else None
    if reference is None or known is None:
        return f"{text}."
    beside = f"{rows[reference].setting} with {format_metric(known)}"
    return f"{text}, and {beside}; it sent {_bytes(rows[best], rows[reference])}."


def _bytes(row: Row, reference: Row) -> str:
    """How many times fewer or more bytes, and how long a step took."""
    ratio = reference.bytes_sent / (row.bytes_sent or 1)
    sent = "as many bytes"
    if ratio >= FEWER:
        sent = f"{ratio:.1f} times fewer bytes"
    elif 0 < ratio <= 1 / FEWER:
        sent = f"{1 / ratio:.1f} times as many bytes"
    if not row.ms_per_step or not reference.ms_per_step:
        return sent
    times = f"{row.ms_per_step:.0f} ms instead of {reference.ms_per_step:.0f} ms"
    return f"{sent}, and a step took {times}"
