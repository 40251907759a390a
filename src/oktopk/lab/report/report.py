# SPDX-License-Identifier: Apache-2.0
"""`oktopk report RUN`: one page about a run, with a summary at its top."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from oktopk.lab.report import charts
from oktopk.lab.report.charts import (
    PhaseTimes,
    cost_sentences,
    downsample,
    histograms,
    phase_changes,
    phase_times,
    tensors,
    times,
    traffic,
)
from oktopk.lab.report.page import Section, code, folded, paragraph, table, tiles, write_page
from oktopk.lab.runlog.reader import METRICS_FILE, RunLog, has_checkpoint, read_runlog
from oktopk.lab.runlog.schema import (
    STEP_PARTS,
    MemoryRecord,
    MetricInfo,
    PhaseTotals,
    ProbeRecord,
    RunRecord,
    WarningRecord,
)
from oktopk.lab.runlog.writer import totals_of_all_ranks, totals_of_rank_0
from oktopk.lab.tasks.base import specs_of
from oktopk.lab.tasks.registry import DEFAULT_TASK, TASKS, options_type
from oktopk.lab.train.config import COMMON
from oktopk.utils.arguments import format_bytes, format_duration, format_metric, list_some

# The summary at the top of a report: a few sentences and large numbers.


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


# `oktopk report RUN`: one page about a run.


REPORT = "report.html"
PLAIN = str | int | float | None
"""Types of values that a table shows."""
RUNS = Path("runs")
SHOWN_RUNS = 12
"""How many runs a message names."""
SHOWN = ("oktopk", "torch", "python")
"""The versions at the top of a report; all of them are at its end."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="a run's folder, or its name in runs/"
    )
    parser.add_argument("--out", type=Path, help=f"default: {REPORT} in the folder")


def command(args: argparse.Namespace) -> int:
    folder = find_run(args.folder)
    if folder is None:
        sys.stderr.write(f"oktopk report: there is no folder {args.folder}{_known()}\n")
        return 2
    if several := several_runs(folder, "report"):
        sys.stderr.write(f"oktopk report: {several}\n")
        return 2
    try:
        path = report(folder, args.out)
    except OSError as error:
        sys.stderr.write(f"oktopk report: the report could not be written: {error}\n")
        return 1
    sys.stdout.write(f"{path} ({format_bytes(path.stat().st_size)}): open it in a browser\n")
    return 0


def find_run(path: Path) -> Path | None:
    """The directory as given, or the one of that name in runs/."""
    return next((folder for folder in (path, RUNS / path) if folder.is_dir()), None)


def several_runs(folder: Path, verb: str) -> str:
    """Why a folder is not one run but has runs in it, and what to do; empty if it is one."""
    runs = [] if (folder / METRICS_FILE).exists() else runs_in(folder)
    some = list_some(runs, SHOWN_RUNS)
    return f"{folder} is not a run, but has runs in it: {verb} one of {some}" if runs else ""


def runs_in(folder: Path) -> list[str]:
    """The runs in a folder, and the comparisons and sweeps in it, which contain runs."""
    found = {path.parent for path in folder.glob(f"*/{METRICS_FILE}")}
    found |= {path.parent.parent for path in folder.glob(f"*/*/{METRICS_FILE}")}
    return [str(path) for path in sorted(found)]


def _known() -> str:
    names = sorted(path.name for path in RUNS.iterdir() if path.is_dir()) if RUNS.is_dir() else []
    return f"; runs/ has {', '.join(names)}" if names else ""


def report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run, however it ended, and return its path."""
    runlog = read_runlog(folder)
    path = out or folder / REPORT
    title = f"{folder.resolve().name}: report of a run"
    write_page(path, title, f"{summary(runlog)}\n{_origin(runlog)}", sections(runlog))
    return path


def sections(runlog: RunLog) -> list[Section]:
    """All sections of a report. Sections with nothing to show have no blocks."""
    measured: list[Section] = []
    if runlog.steps:
        steps = downsample(runlog.steps)
        measured = [
            Section("Learning", charts.learning(runlog)),
            Section("Where the time went", times(runlog)),
            Section("What was kept", charts.compression(runlog, steps)),
            Section("Where the bytes went", traffic(runlog, steps)),
            Section("Which parameters are sparsified", tensors(runlog)),
            Section("Gradients and residuals", histograms(runlog)),
            Section("Quality of selection", _quality(runlog)),
        ]
    return [
        *measured,
        Section("Samples", _samples(runlog)),
        Section("Memory", _memory(runlog)),
        Section("Settings", _settings(runlog)),
        Section("Versions and machine", _machine(runlog)),
    ]


def _quality(runlog: RunLog) -> list:
    if any(step.phase == "sparse" for step in runlog.steps) and not runlog.of(ProbeRecord):
        return [paragraph("Nothing was probed: --probe-every 50 probes every 50 steps.", "note")]
    return charts.quality(runlog)


def _samples(runlog: RunLog) -> list[str]:
    records = [record for record in runlog.validations if record.samples]
    if not records:
        return []
    shown = [records[i] for i in sorted({0, len(records) // 2, len(records) - 1})]
    names = list(dict.fromkeys(name for r in shown for s in r.samples or () for name in s))
    rows = [
        [record.step + 1, *(sample.get(name, "") for name in names)]
        for record in shown
        for sample in record.samples or ()
    ]
    return [table(["step", *names], rows)]


def _memory(runlog: RunLog) -> list[str]:
    if not runlog.of(MemoryRecord):
        return []
    ranks = runlog.of(MemoryRecord)[-1].ranks
    names = {"rss": "resident", "rss_peak": "peak"}
    if any(memory.gpu_allocated_peak for memory in ranks):
        names["gpu_allocated_peak"] = "GPU peak"
    rows = [
        [f"rank {rank}", *(format_bytes(getattr(memory, name) or 0) for name in names)]
        for rank, memory in enumerate(ranks)
    ]
    return [table(["", *names.values()], rows)]


def _settings(runlog: RunLog) -> list[str]:
    """What differs from the defaults; the rest is folded."""
    usual = _defaults(runlog)
    rows = _plain(runlog.config)
    differs = [[*row, usual.get(row[0], "-")] for row in rows if usual.get(row[0]) != row[1]]
    same = [row for row in rows if usual.get(row[0]) == row[1]]
    rest = [row for row in _plain(runlog.info.settings) if row[0] not in runlog.config]
    changed = [
        [run.step, name, *(str(value) for value in pair[:2])]
        for run in runlog.of(RunRecord)
        for name, pair in (run.changed or {}).items()
        if len(pair) == 2 and all(isinstance(value, PLAIN) for value in pair)
    ]
    tables = [
        (["setting", "value", "default"], differs, "What differs from the defaults:", ""),
        (["step", "setting", "old", "new"], changed, "Changed when the run was resumed:", ""),
        (["setting", "value"], same, "", f"{len(same)} settings at their defaults"),
        (["of the exchange", "value"], rest, "", "What attach set for this optimizer"),
    ]
    return [
        folded(fold, table(head, body, left=True)) if fold else table(head, body, note, left=True)
        for head, body, note, fold in tables
        if body
    ]


def _defaults(runlog: RunLog) -> dict[str, Any]:
    """The defaults of the task's settings; those of the trainer alone for a task of a user."""
    task = str(runlog.config.get("task", DEFAULT_TASK))
    own = specs_of(options_type(task)) if task in TASKS else {}
    return {name: spec.default for name, spec in (COMMON | own).items()}


def _plain(values: dict[str, Any] | None) -> list[list[Any]]:
    """Names and values, without values that are lists or objects."""
    return [[name, value] for name, value in (values or {}).items() if isinstance(value, PLAIN)]


def _machine(runlog: RunLog) -> list[str]:
    runs, info = runlog.of(RunRecord), runlog.info
    if not runs:
        return []
    machine = dict(info.machine or {})
    if machine.get("memory"):
        machine["memory"] = format_bytes(machine["memory"])
    begun, *resumed = (run.time or "?" for run in runs)
    rows = [["begun", begun], *(["resumed", time] for time in resumed)]
    rows += [["ranks", info.size or "?"]]
    rows += [*_plain(machine), *_plain(info.versions)]
    return [table(["", ""], [[name, str(value)] for name, value in rows], left=True)]


def _origin(runlog: RunLog) -> str:
    """The command that made the run, and the versions it ran with."""
    info = runlog.info
    versions = [f"{name} {value}" for name, value in _plain(info.versions) if name in SHOWN]
    when = f"begun {runlog.of(RunRecord)[0].time}" if runlog.of(RunRecord) else ""
    line = " \N{MIDDLE DOT} ".join(filter(None, [*versions, when]))
    return (code(info.command) if info.command else "") + (paragraph(line, "note") if line else "")
