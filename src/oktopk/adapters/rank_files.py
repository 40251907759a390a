# SPDX-License-Identifier: Apache-2.0
"""The state of every rank as files of its own in one folder, and who reads which of them.

No rank waits for another while it writes, and one of them may fail: its disk is full. So a rank
keeps its last two files, whose names say when they were saved, and all ranks load the newest that
every one of them has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oktopk.engine.saved_state import parse_metadata
from oktopk.utils.files import FileError, file_error, read_tensors, write_tensors

NAME = re.compile(r"oktopk-(\d+)-of-(\d+)(?:\.step-(\d+)(?:-(\d+))?)?\.pt")

Moment = tuple[int, int]
"""When a state was saved: after how many exchanges, and local steps since."""

UNKNOWN: Moment = (-1, -1)
"""Of a file without a step in its name, as earlier versions wrote them."""

Offer = tuple[int, int, int, int]
"""What a rank can load: 1 for its own file and 0 for those of another world size, the moment, and
the world size. The larger, the better."""


class NoStatesError(FileError):
    """No rank has saved a state in a folder: a run without oktopk may have written the rest."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file, as its name says."""

    path: Path
    rank: int
    size: int
    moment: Moment


def moment_of(state: dict[str, Any]) -> Moment:
    """When a state was taken. With several fragments the exchanges of all count."""
    parts = state.get("fragments", [state])
    steps = sum(parse_metadata(part["metadata"]).engine.step for part in parts)
    return steps, min(part.get("local_steps", 0) for part in parts)


def path_of(folder: Path, rank: int, world_size: int, moment: Moment) -> Path:
    """Where a rank's state is."""
    steps, local_steps = moment
    when = f".step-{steps}" if steps >= 0 else ""
    when += f"-{local_steps}" if local_steps > 0 else ""
    return folder / f"oktopk-{rank}-of-{world_size}{when}.pt"


def write_state(
    folder: Path, state: dict[str, Any], rank: int, world_size: int, moment: Moment
) -> Path:
    """Write this rank's file, and remove those that nobody needs any more.

    OSError, with the name of the file, if it cannot be written; the earlier ones are still there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, rank, world_size, moment)
    write_tensors(path, state)
    for stale in _stale(_saved(folder), rank, world_size, moment):
        stale.unlink(missing_ok=True)
    return path


def _stale(saved: list[_File], rank: int, world_size: int, now: Moment) -> list[Path]:
    """Of this rank, all but its last two and the newest that all ranks have, as far as is seen from
    here; those of later steps are of a run that was given up. Of other world sizes all, once this
    one has a state of every rank, or this rank has saved twice."""
    own = {each.moment: each.path for each in saved if (each.rank, each.size) == (rank, world_size)}
    complete = [each for each in _complete(saved, world_size) if each <= now]
    earlier = [each for each in own if each < now]
    kept = {now, *sorted(earlier)[-1:], *sorted(complete)[-1:]}
    stale = [path for each, path in own.items() if each not in kept]
    if earlier or now in complete:
        stale += [each.path for each in saved if each.size != world_size]
    return stale


def has_states(folder: Path) -> bool:
    """Whether some rank has saved a state there."""
    return bool(_saved(folder))


def is_complete(folder: Path, world_size: int) -> bool:
    """Whether all of so many ranks have saved a state of one moment there, as seen from here."""
    return bool(_complete(_saved(folder), world_size))


def offers(folder: Path, rank: int, world_size: int) -> list[Offer]:
    """What this rank could load: its own states, or those of all ranks of another world size."""
    saved = _saved(folder)
    own = [each.moment for each in saved if (each.rank, each.size) == (rank, world_size)]
    others = {each.size for each in saved} - {world_size}
    return [(1, *moment, world_size) for moment in own] + [
        (0, *moment, size) for size in others for moment in _complete(saved, size)
    ]


def read_states(
    folder: Path, rank: int, world_size: int, chosen: tuple[int, ...] | None
) -> dict[str, Any] | list[dict[str, Any]]:
    """This rank's own state; if another number of ranks saved, the states of all of them.

    `chosen` is an offer that all ranks have made; None if there is none, which is an error.
    """
    if chosen is None:
        raise _nothing_to_load(folder, rank, world_size)
    is_own, steps, local_steps, size = chosen
    if is_own:
        return read_tensors(path_of(folder, rank, size, (steps, local_steps)))
    return [read_tensors(path_of(folder, each, size, (steps, local_steps))) for each in range(size)]


def _nothing_to_load(folder: Path, rank: int, world_size: int) -> FileError:
    saved = _saved(folder)
    if not saved:
        return NoStatesError(f"{folder}: has no state of any rank; every rank must call save")
    if offers(folder, rank, world_size):
        return file_error(
            folder,
            f"has {_listed(saved)}, and there is no step whose state all ranks have",
            advice="every rank must call save, after the same step",
        )
    if world_size in {each.size for each in saved}:
        path = folder / f"oktopk-{rank}-of-{world_size}.step-*.pt"
        advice = f"{folder} has {_listed(saved)}; every rank must call save"
        return file_error(path, "does not exist", advice=advice)
    size = max(each.size for each in saved)
    missing = sorted(set(range(size)) - {each.rank for each in saved if each.size == size})
    return file_error(
        folder,
        f"{size} ranks saved their states, and those of ranks {missing} are not here"
        if missing
        else f"{size} ranks saved their states, and not of the same step: {_listed(saved)}",
        advice=f"copy them here, or resume with {size} ranks",
    )


def _complete(saved: Iterable[_File], size: int) -> list[Moment]:
    """The moments of which all ranks of a world size have a file."""
    ranks: dict[Moment, set[int]] = {}
    for each in saved:
        if each.size == size:
            ranks.setdefault(each.moment, set()).add(each.rank)
    return [moment for moment, having in ranks.items() if having == set(range(size))]


def _saved(folder: Path) -> list[_File]:
    found = []
    for path in sorted(folder.glob("oktopk-*-of-*.pt")):
        if match := NAME.fullmatch(path.name):
            rank, size, steps, local_steps = match.groups()
            moment = UNKNOWN if steps is None else (int(steps), int(local_steps or 0))
            found.append(_File(path, int(rank), int(size), moment))
    return found


def _listed(saved: Iterable[_File]) -> str:
    return ", ".join(each.path.name for each in saved)
