# SPDX-License-Identifier: Apache-2.0
"""`oktopk report RUN`: one page about a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from oktopk.report import curves
from oktopk.report.downsample import downsample
from oktopk.report.page import (
    Section,
    code,
    folded,
    paragraph,
    table,
    write_page,
)
from oktopk.report.summary import summary
from oktopk.report.tensors import histograms, tensors
from oktopk.report.times import times
from oktopk.report.traffic import traffic
from oktopk.runlog.reader import RunLog, read_runlog
from oktopk.runlog.run_directory import METRICS_FILE
from oktopk.runlog.schema import MemoryRecord, ProbeRecord, RunRecord
from oktopk.train.config import COMMON
from oktopk.train.option import specs_of
from oktopk.train.tasks.registry import DEFAULT_TASK, TASKS, options_type
from oktopk.utils.units import format_bytes, list_some

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
            Section("Learning", curves.learning(runlog)),
            Section("Where the time went", times(runlog)),
            Section("What was kept", curves.compression(runlog, steps)),
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
    return curves.quality(runlog)


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
