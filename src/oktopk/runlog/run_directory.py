# SPDX-License-Identifier: Apache-2.0
"""The directory of a run: NAME, NAME-2, NAME-3, ... in the folder of all runs.

A new run gets a new directory, a resumed run finds its own, and a lock keeps a second process from
writing to it.
"""

from __future__ import annotations

import fcntl
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from oktopk.errors import RunError

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.toml"
CHECKPOINT_FOLDER = "checkpoints"


def has_checkpoint(directory: Path) -> bool:
    """Whether a run can be resumed from a checkpoint."""
    return any(directory.glob(f"{CHECKPOINT_FOLDER}/step-*/complete.json"))


def run_directory(runs: Path, name: str, number: int) -> Path:
    """The directory with that number; the first one has no number in its name."""
    return runs / (name if number <= 1 else f"{name}-{number}")


def latest_number(runs: Path, name: str) -> int:
    """The highest number of a directory with that name; 0 when there is none."""
    return max(_numbers(runs, name), default=0)


def latest_resumable(runs: Path, name: str) -> int:
    """The highest number of a directory that has a checkpoint; 0 when there is none."""
    numbers = _numbers(runs, name)
    return max((n for n in numbers if has_checkpoint(run_directory(runs, name, n))), default=0)


def _numbers(runs: Path, name: str) -> list[int]:
    found = []
    for path in runs.iterdir() if runs.is_dir() else ():
        match = re.fullmatch(re.escape(name) + r"(?:-([2-9]|[1-9][0-9]{1,8}))?", path.name)
        if match and path.is_dir():
            found.append(int(match[1] or 1))
    return found


def create_run_directory(runs: Path, name: str, resume: bool) -> int:
    """Create the directory of a run and return its number.

    To resume, it is the latest directory that has a checkpoint, or else the latest. A new run gets
    a directory that did not exist.
    """
    last = latest_number(runs, name)
    number = max(1, (latest_resumable(runs, name) or last) if resume else last + 1)
    while True:
        try:
            run_directory(runs, name, number).mkdir(parents=True, exist_ok=resume)
        except FileExistsError:  # another run was faster
            number += 1
        else:
            return number


def check_writable(runs: Path) -> None:
    """Raise if no directory can be created in `runs`. Nothing is left behind."""
    place = next(path for path in (runs, *runs.parents) if path.exists())
    try:
        TemporaryDirectory(dir=place).cleanup()
    except OSError as error:
        raise RunError(
            f"no folder can be made in {runs} ({error.strerror}): give another --runs"
        ) from error


def lock(directory: Path) -> IO[str]:
    """Keep other processes from writing to the directory for as long as the file is open."""
    file = (directory / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise RunError(f"another run is writing to {directory}: wait for it or end it") from error
    return file
