# SPDX-License-Identifier: Apache-2.0
"""The outcome of a comparison in a sentence or two."""

from __future__ import annotations

from collections.abc import Sequence

from oktopk.compare.results import Row
from oktopk.runlog.reader import RunLog
from oktopk.train.target import Target
from oktopk.utils.units import format_bytes, format_duration

REFERENCES = ("ddp_dense", "dense")
"""Methods that the others are compared with: the first that has a run."""


def reference_of(runlogs: Sequence[RunLog], runlog: RunLog) -> int | None:
    """The number of the run that a run is compared with: dense, with the same seed."""
    seed = runlog.config.get("seed")
    for method in REFERENCES:
        for i, other in enumerate(runlogs):
            if other.config.get("method") == method and other.config.get("seed") == seed:
                return i
    return None


def network_of(runlogs: Sequence[RunLog]) -> str:
    """The network of all runs, for a sentence; says so if they had different ones."""
    networks = {runlog.info.network or "" for runlog in runlogs if runlog.steps}
    if len(networks) > 1:
        return " (on different networks)"
    return "".join(f" at {network}" for network in networks if network)


def verdict(runlogs: Sequence[RunLog], rows: Sequence[Row], target: Target | None) -> str:
    """Who reached the target first, and how much sooner than dense; empty without a target."""
    if target is None or not rows:
        return ""
    network = network_of(runlogs)
    arrived = sorted(
        (row.arrival.seconds, i) for i, row in enumerate(rows) if row.arrival is not None
    )
    if not arrived:
        return f"No run reached {target}{network}."
    seconds, best = arrived[0]
    first = rows[best]
    assert first.arrival is not None
    text = (
        f"{first.setting} reached {target}{network} first, after {format_duration(seconds)} of "
        f"training and {format_bytes(first.arrival.bytes_sent)}"
    )
    reference = reference_of(runlogs, runlogs[best])
    if reference is None or reference == best:
        return f"{text}."
    return f"{text}; {_behind(first, rows[reference])}."


def _behind(first: Row, reference: Row) -> str:
    """How far the reference run was behind."""
    assert first.arrival is not None
    if reference.arrival is None:
        after = f"in {format_duration(60 * reference.minutes)}"
        if reference.state != "finished":
            return f"{reference.setting} is {reference.state}, and had not reached it {after}"
        return (
            f"{reference.setting} did not reach it {after} and {format_bytes(reference.bytes_sent)}"
        )
    sooner = reference.arrival.seconds / first.arrival.seconds if first.arrival.seconds else 0.0
    took = (
        f"{reference.setting} took {format_duration(reference.arrival.seconds)} and "
        f"{format_bytes(reference.arrival.bytes_sent)}: {sooner:.1f} times sooner"
    )
    ratio = reference.arrival.bytes_sent / (first.arrival.bytes_sent or 1.0)
    return f"{took}, with {ratio:.1f} times fewer bytes" if ratio > 1 else took
