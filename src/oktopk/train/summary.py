# SPDX-License-Identifier: Apache-2.0
"""The summary that `oktopk train` prints when a run has finished."""

from __future__ import annotations

from pathlib import Path

from oktopk.runlog.aggregates import RunTotals
from oktopk.runlog.schema import PhaseTotals
from oktopk.train.config import Config
from oktopk.train.target import Target, parse_target
from oktopk.train.tasks.registry import task_type
from oktopk.train.validate import Validation
from oktopk.utils.units import format_bytes, format_duration, format_metric


def summary(
    config: Config,
    result: Validation | None,
    totals: RunTotals,
    seconds: float,
    directory: Path,
    workers: int,
) -> str:
    """Metrics, bytes by phase compared with dense, the time, and where the files are."""
    lines = [f"finished in {format_duration(seconds)}"]
    if result is not None:
        task = task_type(config.task)
        shown = (
            f"{m.label} {format_metric(result.metrics[m.name])}" for m in task.metrics if m.shown
        )
        lines.append(f"{', '.join(shown)} on {result.examples} {task.unit}")
        if config.until:
            lines.append(_target_line(parse_target(config.until, task.metrics), result, totals))
    lines.append(f"{'':12} {'steps':>6} {'ms/step':>8} {'sent':>10} {'as dense':>10} {'ratio':>7}")
    phases = {phase: sums for phase, sums in totals.items() if sums.steps}
    if len(phases) > 1:
        lines += [_row(f"{phase} phase", sums) for phase, sums in phases.items()]
    lines.append(_row("whole run", totals.whole))
    of = f"all {workers} workers" if workers > 1 else "the one worker"
    lines.append(f"bytes are those of {of}, headers included")
    if totals.whole.skipped:
        lines.append(f"{totals.whole.skipped} steps were skipped: a gradient was not finite")
    lines.append(f"run folder: {directory} (metrics, TensorBoard events, checkpoints, config)")
    lines.append(f"to look at it: {directory / 'report.html'}")
    return "\n".join(lines)


def _target_line(target: Target, result: Validation, totals: RunTotals) -> str:
    reached = "reached" if target.is_reached(result.metrics) else "not reached"
    whole = totals.whole
    took = format_duration(whole.microseconds / 1e6)
    return f"{target} was {reached} after {whole.steps} steps, {took} of training"


def _row(name: str, sums: PhaseTotals) -> str:
    each = f"{sums.microseconds / sums.steps / 1e3:.0f}" if sums.steps else "-"
    ratio = f"{sums.bytes_dense / sums.bytes_sent:.1f}x" if sums.bytes_sent else "-"
    sent, dense = format_bytes(sums.bytes_sent), format_bytes(sums.bytes_dense)
    return f"{name:12} {sums.steps:6} {each:>8} {sent:>10} {dense:>10} {ratio:>7}"
