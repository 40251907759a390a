"""The outcome of a comparison in a sentence or two."""

from __future__ import annotations

from collections.abc import Sequence

from oktopk.compare.results import Row
from oktopk.runlog.reader import RunLog
from oktopk.train.target import Target
from oktopk.utils.units import format_bytes, format_duration


def verdict(runlogs: Sequence[RunLog], rows: Sequence[Row], target: Target | None) -> str:
    """Who reached the target first, and how much sooner than the first row; empty without one."""
    if target is None or not rows:
        return ""
    network = next((f" at {r.info.network}" for r in runlogs if r.info.network), "")
    arrived = sorted(
        (row.arrival.seconds, i) for i, row in enumerate(rows) if row.arrival is not None
    )
    if not arrived:
        return f"No run reached {target}{network}."
    first = rows[arrived[0][1]]
    assert first.arrival is not None
    text = (
        f"{first.setting} reached {target}{network} first, after "
        f"{format_duration(first.arrival.seconds)} of training and "
        f"{format_bytes(first.arrival.bytes_sent)}"
    )
    reference = rows[0]
    if reference is first:
        return f"{text}."
    return f"{text}; {_behind(first, reference)}."


def _behind(first: Row, reference: Row) -> str:
    """How far the reference run was behind."""
    assert first.arrival is not None
    if reference.arrival is None:
        return (
            f"{reference.setting} did not reach it in {format_duration(60 * reference.minutes)} "
            f"and {format_bytes(reference.bytes_sent)}"
        )
    sooner = reference.arrival.seconds / first.arrival.seconds if first.arrival.seconds else 0.0
    fewer = (
        reference.arrival.bytes_sent / first.arrival.bytes_sent if first.arrival.bytes_sent else 0.0
    )
    return (
        f"{reference.setting} took {format_duration(reference.arrival.seconds)} and "
        f"{format_bytes(reference.arrival.bytes_sent)}: {sooner:.1f} times sooner, with "
        f"{fewer:.1f} times fewer bytes"
    )
