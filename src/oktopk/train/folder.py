"""The folder of a run: found again to resume, never written over, by one run at a time."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path
from typing import IO

from oktopk.train.errors import RunError

CHECKPOINTS = "checkpoints"


def numbered(runs: Path, name: str, number: int) -> Path:
    """NAME, NAME-2, NAME-3, ..."""
    return runs / (name if number <= 1 else f"{name}-{number}")


def newest(runs: Path, name: str) -> int:
    """The highest number of a folder of that name; 0 when there is none."""
    found = [0]
    for path in runs.iterdir() if runs.is_dir() else ():
        match = re.fullmatch(re.escape(name) + r"(?:-(\d+))?", path.name)
        if match and path.is_dir():
            found.append(int(match[1] or 1))
    return max(found)


def make(runs: Path, name: str, resume: bool) -> int:
    """Make the folder and return its number: the newest to resume, else one that was not there."""
    number = newest(runs, name) + (not resume)
    number = max(number, 1)
    while True:
        try:
            numbered(runs, name, number).mkdir(parents=True, exist_ok=resume)
        except FileExistsError:  # another run was faster
            number += 1
        else:
            return number


def lock(folder: Path) -> IO[str]:
    """Keep others from writing to the folder as long as the file is open."""
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise RunError(f"another run is writing to {folder}: wait for it or end it") from error
    return file
