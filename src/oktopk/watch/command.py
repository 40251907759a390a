"""`oktopk watch RUN`: look at a run until it ends."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from oktopk.report.command import RUNS
from oktopk.report.record import JOURNAL

KNOWN = ["--once", "--every"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `oktopk watch`."""
    parser.add_argument("folder", metavar="RUN", help="a run's folder, or its name in runs/")
    parser.add_argument("--once", action="store_true", help="show it once and leave")
    parser.add_argument(
        "--every", type=float, default=1.0, help="seconds between looks (%(default)s)"
    )


def find(run: str) -> Path:
    """The folder of a run that may not have begun yet."""
    return Path(run) if Path(run).is_dir() or len(Path(run).parts) > 1 else RUNS / run


def command(args: argparse.Namespace) -> int:
    """Show the run until it ended; 0 when it finished."""
    from rich.console import Console, RenderableType
    from rich.live import Live

    from oktopk.watch.screen import screen
    from oktopk.watch.seen import Watched

    folder = find(args.folder)
    watched = Watched(folder / JOURNAL)

    def look() -> RenderableType:
        return screen(watched.look(), str(folder), quiet(folder / JOURNAL))

    console = Console()
    if args.once:
        console.print(look())
        return 0
    with Live(look(), console=console, auto_refresh=False) as live:
        while watched.seen.end is None:
            time.sleep(max(0.05, args.every))
            live.update(look(), refresh=True)
    return 0 if watched.seen.end["how"] == "finished" else 1


def quiet(journal: Path) -> float:
    """Seconds since the journal last grew."""
    return max(0.0, time.time() - journal.stat().st_mtime) if journal.exists() else 0.0
