"""`oktopk report RUN`: one page about a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from oktopk.report import curves
from oktopk.report.downsample import columns
from oktopk.report.page import (
    Section,
    paragraph,
    table,
    write_page,
)
from oktopk.report.summary import verdict
from oktopk.report.tensors import spreads, tensors
from oktopk.report.times import times
from oktopk.report.traffic import traffic
from oktopk.runlog.reader import Entry, Record, read
from oktopk.utils.units import size

REPORT = "report.html"
PLAIN = str | int | float | None
"""Values that a table shows."""
RUNS = Path("runs")


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
    try:
        path = report(folder, args.out)
    except OSError as error:
        sys.stderr.write(f"oktopk report: the report could not be written: {error}\n")
        return 1
    sys.stdout.write(f"{path} ({size(path.stat().st_size)}): open it in a browser\n")
    return 0


def find_run(path: Path) -> Path | None:
    """The folder as given, or one of that name in runs/."""
    return next((folder for folder in (path, RUNS / path) if folder.is_dir()), None)


def _known() -> str:
    names = sorted(path.name for path in RUNS.iterdir() if path.is_dir()) if RUNS.is_dir() else []
    return f"; runs/ has {', '.join(names)}" if names else ""


def report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run, whatever became of it, and return its path."""
    record = read(folder)
    path = out or folder / REPORT
    title = f"{folder.resolve().name}: report of a run"
    write_page(path, title, verdict(record), sections(record))
    return path


def sections(record: Record) -> list[Section]:
    """All parts of a report; those with nothing to show are empty."""
    measured: list[Section] = []
    if record.steps:
        steps = columns(record.steps)
        measured = [
            Section("Learning", curves.learning(record, steps)),
            Section("What was kept", curves.compression(record, steps)),
            Section("Where the bytes went", traffic(record, steps)),
            Section("Where the time went", times(record, steps)),
            Section("Which parameters are sparsified", tensors(record)),
            Section("Gradients and residuals", spreads(record)),
            Section("Quality of selection", _quality(record)),
        ]
    return [
        *measured,
        Section("Decoded samples", _samples(record)),
        Section("Memory", _memory(record)),
        Section("Settings", _settings(record)),
        Section("Versions and machine", _machine(record)),
    ]


def _quality(record: Record) -> list:
    if any(entry.get("phase") == "sparse" for entry in record.steps) and not record.of("probe"):
        return [paragraph("Nothing was probed: --probe-every 50 looks every 50 steps.", "note")]
    return curves.quality(record)


def _samples(record: Record) -> list[str]:
    heard = [entry for entry in record.validated if entry.get("samples")]
    if not heard:
        return []
    shown = [heard[i] for i in sorted({0, len(heard) // 2, len(heard) - 1})]
    rows = [
        [entry["epoch"], sample["said"], sample["heard"]]
        for entry in shown
        for sample in entry["samples"]
    ]
    return [table(["epoch", "said", "heard"], rows)]


def _memory(record: Record) -> list[str]:
    if not record.of("memory"):
        return []
    ranks = record.of("memory")[-1]["ranks"]
    names = {"rss": "resident", "rss_peak": "peak"}
    if any(own.get("gpu_allocated_peak") for own in ranks):
        names["gpu_allocated_peak"] = "GPU peak"
    rows = [
        [f"rank {rank}", *(size(own.get(name) or 0) for name in names)]
        for rank, own in enumerate(ranks)
    ]
    return [table(["", *names.values()], rows)]


def _settings(record: Record) -> list[str]:
    rows = _plain(record.config)
    rest = [row for row in _plain(record.opening.get("settings")) if row[0] not in record.config]
    changed = [
        [entry["step"], name, *(str(value) for value in pair[:2])]
        for entry in record.of("run")
        for name, pair in (entry.get("changed") or {}).items()
        if len(pair) == 2 and all(isinstance(value, PLAIN) for value in pair)
    ]
    tables = {
        "": (["setting", "value"], rows),
        "What attach made of them for this optimizer:": (["of the exchange", "value"], rest),
        "Changed when the run was resumed:": (["step", "setting", "before", "since"], changed),
    }
    return [table(head, body, note) for note, (head, body) in tables.items() if body]


def _plain(facts: Entry | None) -> list[list[Any]]:
    """Names and values, without those that are lists or objects."""
    return [[name, value] for name, value in (facts or {}).items() if isinstance(value, PLAIN)]


def _machine(record: Record) -> list[str]:
    opening = record.opening
    if not opening:
        return []
    machine = dict(opening.get("machine") or {})
    if machine.get("memory"):
        machine["memory"] = size(machine["memory"])
    resumed = [entry.get("time") or "?" for entry in record.of("run")]
    rows = [["begun", resumed[0]], *(["resumed", time] for time in resumed[1:])]
    rows += [["ranks", opening.get("size") or "?"]]
    rows += [*_plain(machine), *_plain(opening.get("versions"))]
    return [table(["", ""], [[name, str(value)] for name, value in rows])]
