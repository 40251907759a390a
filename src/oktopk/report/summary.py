# SPDX-License-Identifier: Apache-2.0
"""The summary at the top of a report: a few sentences and large numbers."""

from __future__ import annotations

from oktopk.report.curves import phase_changes
from oktopk.report.page import paragraph, tiles
from oktopk.report.phases import PhaseTimes, cost_sentences, phase_times
from oktopk.runlog.aggregates import totals_of_all_ranks, totals_of_rank_0
from oktopk.runlog.reader import RunLog
from oktopk.runlog.run_directory import has_checkpoint
from oktopk.runlog.schema import STEP_PARTS, MetricInfo, PhaseTotals, WarningRecord
from oktopk.utils.units import format_bytes, format_duration, format_metric, list_some

MAX_SHOWN = 8
"""Skipped steps and warnings that are listed."""


def summary(runlog: RunLog) -> str:
    """The top of a report, as HTML."""
    parts = [paragraph(text, "summary") for text in sentences(runlog)]
    if runlog.steps:
        parts.append(tiles(_key_figures(runlog)))
    parts += [paragraph(text, "bad") for text in problems(runlog)]
    return "\n".join(parts)


def sentences(runlog: RunLog) -> list[str]:
    """How the run ended, whether it learned, when it became sparse, and what that cost."""
    texts = (_ending(runlog), _learned(runlog), _phases(runlog), *cost_sentences(runlog))
    return [text for text in texts if text]


def problems(runlog: RunLog) -> list[str]:
    """Problems that a reader must know before trusting the rest."""
    found = list(runlog.problems)
    skipped = [step.step for step in runlog.steps if step.skipped]
    if skipped:
        what = "step was" if len(skipped) == 1 else "steps were"
        found.append(
            f"{len(skipped)} {what} skipped by all ranks because a gradient was not finite: "
            f"{list_some(skipped, MAX_SHOWN)}."
        )
    warnings = _warnings(runlog)
    found += [f"Warning: {text}" for text in warnings[:MAX_SHOWN]]
    if len(warnings) > MAX_SHOWN:
        found.append(f"{len(warnings) - MAX_SHOWN} more warnings are in metrics.jsonl.")
    return found


def _warnings(runlog: RunLog) -> list[str]:
    """The warnings, except those about skipped steps, which are counted separately."""
    return [w.text for w in runlog.of(WarningRecord) if "NaN or Inf" not in w.text]


def _ending(runlog: RunLog) -> str:
    end, total = runlog.end, runlog.info.total_steps
    if not runlog.steps:
        return "Nothing was recorded here: the run never finished a step."
    done = runlog.steps[-1].step + 1
    of = f"step {done} of {total}" if total else f"step {done}"
    if end is None:
        advice = " The same command with --resume continues from its last checkpoint."
        return f"The metrics end at {of}: the run is still running, or it was killed." + (
            advice if has_checkpoint(runlog.directory) else ""
        )
    if end.how == "finished":
        took = f" in {format_duration(end.seconds)}" if end.seconds is not None else ""
        return f"The run finished: {done} steps{took}."
    how = "was stopped" if end.how == "stopped" else "failed"
    return f"The run {how} at {of}: {end.text or 'no reason was recorded'}"


def _learned(runlog: RunLog) -> str:
    metric = runlog.metrics[0] if runlog.metrics else MetricInfo("", "")
    sign = -1 if metric.higher_is_better else 1
    known = [(r.step + 1, r.metrics.get(metric.name)) for r in runlog.validations]
    rates = [(step, value) for step, value in known if value is not None]
    if len(rates) > 1 and sign * rates[-1][1] < sign * rates[0][1]:
        (first, before), (last, after) = rates[0], rates[-1]
        best, value = min(rates, key=lambda pair: sign * pair[1])
        better = (
            f"; it was best after step {best}: {format_metric(value)}" if value != after else ""
        )
        return (
            f"It learned: {metric.label} went from {format_metric(before)} after step {first} to "
            f"{format_metric(after)} after step {last}{better}."
        )
    losses = [step.loss for step in runlog.steps if step.loss is not None]
    if len(losses) < 2:
        return ""
    some = max(1, len(losses) // 10)
    before, after = sum(losses[:some]) / some, sum(losses[-some:]) / some
    # at first a model may recognize nothing, although its loss already falls
    last = f" {metric.label} is not better yet: {format_metric(rates[-1][1])}." if rates else ""
    last = last or " It was not validated."
    return f"Training loss went from {before:.3g} to {after:.3g}.{last}"


def _phases(runlog: RunLog) -> str:
    changes = phase_changes(runlog)
    if not changes:
        return ""
    sparse = [start for phase, start, _ in changes if phase == "sparse"]
    if sparse:
        return f"It became sparse at step {sparse[0]}." if sparse[0] else "It was always sparse."
    settings = runlog.info.settings or {}
    if settings.get("method", runlog.config.get("method")) == "dense":
        return "The method was dense, which saves no bytes."
    warmup = settings.get("warmup_steps", runlog.config.get("warmup_steps"))
    until = f" (warmup_steps is {warmup})" if warmup is not None else ""
    return f"It never reached the sparse phase{until}, so no bytes were saved."


def _ratio(sums: PhaseTotals) -> str:
    """How many times fewer bytes were sent than dense training would send."""
    sent, dense = sums.bytes_sent, sums.bytes_dense
    if not sent:
        return "nothing sent"
    return f"{dense / sent:.1f}x fewer" if sent < dense else "as many"


def _sizes(sums: PhaseTotals) -> str:
    return f"{format_bytes(sums.bytes_sent)} instead of {format_bytes(sums.bytes_dense)}"


def _key_figures(runlog: RunLog) -> list[tuple[str, str, str]]:
    """Name, value and remark of the large numbers."""
    of_all = totals_of_all_ranks(runlog)
    totals, whose = (of_all, "all ranks") if of_all else (totals_of_rank_0(runlog), "rank 0")
    whole, sparse = totals.whole, totals["sparse"]
    shown = []
    last = runlog.validations[-1] if runlog.validations else None
    if last is not None and runlog.metrics:
        metric = runlog.metrics[0]
        value = last.metrics.get(metric.name)
        shown.append((metric.label, _number(value), f"after step {last.step + 1}"))
    if whole.bytes_dense:
        shown.append(("bytes, the whole run", _ratio(whole), f"{_sizes(whole)}, {whose}"))
        if sparse.bytes_dense:
            shown.append(("bytes, the sparse phase", _ratio(sparse), _sizes(sparse)))
    shown += _times(runlog)
    skipped = totals_of_rank_0(runlog).whole.skipped
    shown.append(("steps skipped", str(skipped), "for a NaN or Inf"))
    return shown


def _number(value: float | None) -> str:
    return "-" if value is None else format_metric(value)


def _times(runlog: RunLog) -> list[tuple[str, str, str]]:
    """The median time of a step in each phase, and the parts that take most of it."""
    times = phase_times(runlog)
    return [
        (f"a {phase} step, median", f"{found.seconds['whole'] * 1e3:.0f} ms", _shares(found))
        for phase, found in times.items()
    ] or [("a step", "-", "no times were recorded")]


def _shares(found: PhaseTimes) -> str:
    whole = found.seconds["whole"] or 1.0
    shares = {part: found.seconds.get(part, 0.0) / whole for part in STEP_PARTS}
    top = sorted(shares, key=lambda part: -shares[part])[:2]
    text = ", ".join(f"{part} {shares[part]:.0%}" for part in top)
    if "exposed" not in top:
        text += f", exposed {shares['exposed']:.0%}"
    return text
