# SPDX-License-Identifier: Apache-2.0
"""`oktopk watch RUN`: show a run until it ends."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from oktopk.lab.report.report import RUNS, SHOWN_RUNS, runs_in, several_runs
from oktopk.lab.runlog.reader import METRICS_FILE
from oktopk.utils.arguments import list_some, number_in_range

if TYPE_CHECKING:
    from oktopk.lab.watch_screen import RunWatcher

LINE_SECONDS = 3.0
"""Seconds between two lines of output, when stdout is not a terminal."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `oktopk watch`."""
    parser.description = "Show a run until it ends. The exit code is 0 only when it finished."
    parser.add_argument("folder", metavar="RUN", help="a run's folder, or its name in runs/")
    parser.add_argument(
        "--once", action="store_true", help="show it once and exit: exit code 1 while it is running"
    )
    parser.add_argument(
        "--every",
        type=number_in_range(float, 0.05, 3600.0),
        default=1.0,
        help="seconds between updates (%(default)s)",
    )


def find(run: str) -> Path:
    """The directory of a run, which may not have begun yet."""
    return Path(run) if Path(run).is_dir() or len(Path(run).parts) > 1 else RUNS / run


def problem(run: str, folder: Path) -> str:
    """Why there can be no run here; empty if there is one, or may be one later."""
    for path in (folder, Path(run)):
        if path.is_file() and not folder.is_dir():
            return f"{path} is a file: give the folder of a run"
    return several_runs(folder, "watch")


def others(folder: Path) -> str:
    """A hint at the runs that exist, if this one does not: its name may be mistyped."""
    if folder.exists():
        return ""
    found = runs_in(folder.parent if folder.parent.is_dir() else RUNS)
    return f"there is no {folder} yet; there is {list_some(found, SHOWN_RUNS)}" if found else ""


def command(args: argparse.Namespace) -> int:
    """Show the run until it ends. Returns 0 if it finished."""
    from rich.console import Console, RenderableType
    from rich.live import Live

    from oktopk.lab.watch_screen import RunWatcher, screen

    folder = find(args.folder)
    wrong = problem(args.folder, folder)
    if wrong:
        sys.stderr.write(f"oktopk watch: {wrong}\n")
        return 2
    watcher = RunWatcher(folder)

    def refreshed() -> RenderableType:
        return screen(watcher.refresh(), str(folder), seconds_quiet(folder), others(folder))

    console, pause = Console(), args.every
    if args.once:
        console.print(refreshed())
    elif sys.stdout.isatty():
        with Live(refreshed(), console=console, auto_refresh=False) as live:
            while watcher.state.end is None:
                time.sleep(pause)
                live.update(refreshed(), refresh=True)
    else:
        print_lines(watcher, folder, pause)
        console.print(refreshed())
    end = watcher.state.end
    return 0 if end is not None and end.how == "finished" else 1


def print_lines(watcher: RunWatcher, folder: Path, pause: float) -> None:
    """Print a line whenever something is new, for a pipe or a file, until the run ends."""
    from oktopk.lab.train.console import print_line
    from oktopk.lab.watch_screen import line, status

    printed, due = None, 0.0
    while watcher.refresh().end is None:
        state, quiet = watcher.state, seconds_quiet(folder)
        news = (status(state, quiet), state.steps, len(state.validations))
        if news != printed and time.monotonic() >= due:
            print_line(line(state, quiet, others(folder)))
            printed, due = news, time.monotonic() + LINE_SECONDS
        time.sleep(pause)


def seconds_quiet(directory: Path) -> float:
    """Seconds since the last record was written."""
    path = directory / METRICS_FILE
    return max(0.0, time.time() - path.stat().st_mtime) if path.exists() else 0.0
