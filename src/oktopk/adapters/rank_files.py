# SPDX-License-Identifier: Apache-2.0
"""The state of every rank as a file of its own in one folder, and who reads which of them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from oktopk.utils.files import FileError, file_error, read_tensors

NAME = re.compile(r"oktopk-(\d+)-of-(\d+)\.pt")


class NoStatesError(FileError):
    """No rank has saved a state in a folder: a run without oktopk may have written the rest."""


def path_of(folder: Path, rank: int, world_size: int) -> Path:
    """Where a rank's state is."""
    return folder / f"oktopk-{rank}-of-{world_size}.pt"


def write_state(folder: Path, state: dict[str, Any], rank: int, world_size: int) -> Path:
    """Write this rank's file. After a crash or a full disk the previous one is still there.

    Rank 0 removes the files of other world sizes, which are of an earlier run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, rank, world_size)
    draft = path.with_name(f".{path.name}.part")
    try:
        torch.save(state, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    if rank == 0:
        for size, files in _saved(folder).items():
            if size != world_size:
                for stale in files.values():
                    stale.unlink(missing_ok=True)
    return path


def has_states(folder: Path) -> bool:
    """Whether some rank has saved a state there."""
    return bool(_saved(folder))


def read_states(folder: Path, rank: int, world_size: int) -> dict[str, Any] | list[dict[str, Any]]:
    """This rank's own state; if another number of ranks saved, the states of all of them."""
    saved = _saved(folder)
    if not saved:
        raise NoStatesError(f"{folder}: has no state of any rank; every rank must call save")
    own = saved.get(world_size, {}).get(rank)
    if own is not None:
        return read_tensors(own)
    if world_size in saved:
        path = path_of(folder, rank, world_size)
        raise file_error(
            path,
            "does not exist",
            advice=f"{folder} has {_listed(saved)}; every rank must call save",
        )
    size, files = max(saved.items())
    missing = sorted(set(range(size)) - set(files))
    if missing:
        raise file_error(
            folder,
            f"{size} ranks saved their states, and those of ranks {missing} are not here",
            advice=f"copy them here, or resume with {size} ranks",
        )
    return [read_tensors(files[each]) for each in range(size)]


def _saved(folder: Path) -> dict[int, dict[int, Path]]:
    """The files by world size and rank."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob("oktopk-*-of-*.pt")):
        if match := NAME.fullmatch(path.name):
            found.setdefault(int(match[2]), {})[int(match[1])] = path
    return found


def _listed(saved: dict[int, dict[int, Path]]) -> str:
    names = [path.name for files in saved.values() for path in files.values()]
    return ", ".join(names)
