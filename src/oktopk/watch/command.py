"""`oktopk watch RUN`: look at a run until it ends."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from oktopk.report.command import RUNS
from oktopk.runlog.reader import JOURNAL
from oktopk.utils.flags import between
from oktopk.utils.units import few

if TYPE_CHECKING:
    from oktopk.watch.state import Watched

KNOWN = ["--once", "--every"]
LINE_SECONDS = 3.0
"""Between two lines, where there is no screen to draw on."""
SHOWN_RUNS = 12


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `oktopk watch`."""
    parser.description = "Show a run until it ends. The exit code is 0 only when it finished."
    parser.add_argument("folder", metavar="RUN", help="a run's folder, or its name in runs/")
    parser.add_argument(
        "--once", action="store_true", help="show it once and leave: exit code 1 while it goes on"
    )
    parser.add_argument(
        "--every",
        type=between(float, 0.05, 3600.0),
        default=1.0,
        help="seconds between looks (%(default)s)",
    )


def find(run: str) -> Path:
    """The folder of a run that may not have begun yet."""
    return Path(run) if Path(run).is_dir() or len(Path(run).parts) > 1 else RUNS / run


def problem(run: str, folder: Path) -> str:
    """Why this will never be a run; empty when it is one or may become one."""
    for path in (folder, Path(run)):
        if path.is_file() and not folder.is_dir():
            return f"{path} is a file: give the folder of a run"
    runs = [] if (folder / JOURNAL).exists() else runs_in(folder)
    return (
        f"{folder} is no run but has runs in it: watch one of {few(runs, SHOWN_RUNS)}"
        if runs
        else ""
    )


def runs_in(folder: Path) -> list[str]:
    """The runs in a folder, and in it the comparisons and sweeps, which have runs in turn."""
    found = {path.parent for path in folder.glob(f"*/{JOURNAL}")}
    found |= {path.parent.parent for path in folder.glob(f"*/*/{JOURNAL}")}
    return [str(path) for path in sorted(found)]


def others(folder: Path) -> str:
    """The runs that there are, while the one that was asked for is not: a name may be mistyped."""
    if folder.exists():
        return ""
    found = runs_in(folder.parent if folder.parent.is_dir() else RUNS)
    return f"there is no {folder} yet; there is {few(found, SHOWN_RUNS)}" if found else ""


def command(args: argparse.Namespace) -> int:
    """Show the run until it ended; 0 when it finished."""
    from rich.console import Console, RenderableType
    from rich.live import Live

    from oktopk.watch.screen import screen
    from oktopk.watch.state import Watched

    folder = find(args.folder)
    wrong = problem(args.folder, folder)
    if wrong:
        sys.stderr.write(f"oktopk watch: {wrong}\n")
        return 2
    watched = Watched(folder / JOURNAL)

    def look() -> RenderableType:
        return screen(watched.look(), str(folder), quiet(folder / JOURNAL), others(folder))

    console, pause = Console(), args.every
    if args.once:
        console.print(look())
    elif sys.stdout.isatty():
        with Live(look(), console=console, auto_refresh=False) as live:
            while watched.seen.end is None:
                time.sleep(pause)
                live.update(look(), refresh=True)
    else:
        follow(watched, folder, pause)
        console.print(look())
    end = watched.seen.end
    return 0 if end is not None and end["how"] == "finished" else 1


def follow(watched: Watched, folder: Path, pause: float) -> None:
    """A line whenever something is new, for a pipe or a file, until the run ends."""
    from oktopk.train.console import say
    from oktopk.watch.screen import line, status

    told, due = None, 0.0
    while watched.look().end is None:
        seen, silent = watched.seen, quiet(folder / JOURNAL)
        news = (status(seen, silent), seen.steps, len(seen.validated))
        if news != told and time.monotonic() >= due:
            say(line(seen, silent, others(folder)))
            told, due = news, time.monotonic() + LINE_SECONDS
        time.sleep(pause)


def quiet(journal: Path) -> float:
    """Seconds since the journal last grew."""
    return max(0.0, time.time() - journal.stat().st_mtime) if journal.exists() else 0.0
