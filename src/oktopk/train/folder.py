"""The folder of a run: found again to resume, never written over."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS = "checkpoints"


def siblings(runs: Path, name: str) -> dict[int, Path]:
    """The folders NAME, NAME-2, NAME-3, ... that exist, by number."""
    found = {}
    for path in runs.glob(f"{name}*"):
        match = re.fullmatch(re.escape(name) + r"(?:-(\d+))?", path.name)
        if match and path.is_dir():
            found[int(match[1] or 1)] = path
    return found


def numbered(runs: Path, name: str, number: int) -> Path:
    return runs / (name if number <= 1 else f"{name}-{number}")


def choose(runs: Path, name: str, resume: bool) -> int:
    """The number of the folder to use: the newest to resume, a new one otherwise."""
    newest = max(siblings(runs, name), default=0)
    return max(newest, 1) if resume else newest + 1
