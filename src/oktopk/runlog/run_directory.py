"""The folder of a run: found again to resume, never written over, by one run at a time."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from oktopk.errors import RunError
from oktopk.runlog.reader import has_checkpoint


def numbered(runs: Path, name: str, number: int) -> Path:
    """NAME, NAME-2, NAME-3, ..."""
    return runs / (name if number <= 1 else f"{name}-{number}")


def newest(runs: Path, name: str) -> int:
    """The highest number of a folder of that name; 0 when there is none."""
    return max(_numbers(runs, name), default=0)


def resumable(runs: Path, name: str) -> int:
    """The highest number of a folder with a checkpoint; 0 when there is none."""
    numbers = _numbers(runs, name)
    return max((n for n in numbers if has_checkpoint(numbered(runs, name, n))), default=0)


def _numbers(runs: Path, name: str) -> list[int]:
    found = []
    for path in runs.iterdir() if runs.is_dir() else ():
        match = re.fullmatch(re.escape(name) + r"(?:-([2-9]|[1-9][0-9]{1,8}))?", path.name)
        if match and path.is_dir():
            found.append(int(match[1] or 1))
    return found


def make(runs: Path, name: str, resume: bool) -> int:
    """Make the folder and return its number.

    To resume, it is the newest that has a checkpoint, else the newest; a new run has one that was
    not there.
    """
    last = newest(runs, name)
    number = max(1, (resumable(runs, name) or last) if resume else last + 1)
    while True:
        try:
            numbered(runs, name, number).mkdir(parents=True, exist_ok=resume)
        except FileExistsError:  # another run was faster
            number += 1
        else:
            return number


def check_writable(runs: Path) -> None:
    """Refuse a place in which no folder can be made, without leaving one there."""
    place = next(path for path in (runs, *runs.parents) if path.exists())
    try:
        TemporaryDirectory(dir=place).cleanup()
    except OSError as error:
        raise RunError(
            f"no folder can be made in {runs} ({error.strerror}): give another --runs"
        ) from error


def lock(folder: Path) -> IO[str]:
    """Keep others from writing to the folder as long as the file is open."""
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise RunError(f"another run is writing to {folder}: wait for it or end it") from error
    return file
