# SPDX-License-Identifier: Apache-2.0
"""The states of all ranks: gathered, as files in a folder, and for
`torch.distributed.checkpoint`.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from oktopk.comm.communicator import Comm
from oktopk.errors import StateError
from oktopk.exchange.saved_state import RANKS, parse_metadata
from oktopk.utils.files import FileError, file_error, read_tensors, write_tensors

# The states of all ranks as one, for frameworks that save what one rank has.


class Gathers(Protocol):
    """A handle."""

    def gathered_state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class GatheredState:
    """A handle's states of all ranks, with the two methods that frameworks call."""

    def __init__(self, handle: Gathers) -> None:
        self._handle = handle

    def state_dict(self) -> dict[str, Any]:
        """`Handle.gathered_state_dict`: all ranks must call it."""
        return self._handle.gathered_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`Handle.load_state_dict`."""
        self._handle.load_state_dict(state)


def gather_states(mine: dict[str, Any], comm: Comm, device: torch.device) -> dict[str, Any]:
    """Every rank's state, in rank order, on the CPU. Sends the whole state to every other rank."""
    words = _words(mine).to(device)
    sizes = comm.all_gather_size(words.numel(), device, stage="state")
    heard = comm.exchange(
        dict.fromkeys(comm.peers, words),
        {peer: sizes[peer] for peer in comm.peers},
        device,
        stage="state",
    )
    heard[comm.rank] = words
    return {RANKS: [_state(heard[rank]) for rank in range(comm.size)]}


def _words(state: dict[str, Any]) -> Tensor:
    """A state as int32 words, which is what messages are made of."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    padding = -buffer.tell() % 4
    buffer.write(bytes(padding))  # the zip format of torch.save lets bytes follow
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.int32)


def _state(words: Tensor) -> dict[str, Any]:
    data = io.BytesIO(words.cpu().numpy().tobytes())
    return torch.load(data, weights_only=True, map_location="cpu")


# The state of every rank as files of its own in one folder, and who reads which of them.
#
# No rank waits for another while it writes, and one of them may fail: its disk is full. So a rank
# keeps its last two files, whose names say when they were saved, and all ranks load the newest
# that every one of them has.


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
    for draft in folder.glob(f".oktopk-{rank}-of-*.part"):  # of a process that was killed in here
        draft.unlink(missing_ok=True)
    write_tensors(path, state)
    for stale in _stale(_saved(folder), rank, world_size, moment):
        stale.unlink(missing_ok=True)
    return path


def _stale(saved: list[_File], rank: int, world_size: int, now: Moment) -> list[Path]:
    """Of this rank, all but its last two and the newest that all ranks have, as far as is seen from
    here; those of later steps are of a run that was given up. Of other world sizes all, once every
    rank of this one has a state: until then they may be all that can be loaded."""
    own = {each.moment: each.path for each in saved if (each.rank, each.size) == (rank, world_size)}
    complete = [each for each in _complete(saved, world_size) if each <= now]
    earlier = [each for each in own if each < now]
    kept = {now, *sorted(earlier)[-1:], *sorted(complete)[-1:]}
    stale = [path for each, path in own.items() if each not in kept]
    if complete:
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
    folder: Path, rank: int, world_size: int, chosen: Offer
) -> dict[str, Any] | list[dict[str, Any]]:
    """This rank's own state; if another number of ranks saved, the states of all of them.

    `chosen` is an offer that all ranks have made.
    """
    is_own, steps, local_steps, size = chosen
    if is_own:
        return read_tensors(path_of(folder, rank, size, (steps, local_steps)))
    return [read_tensors(path_of(folder, each, size, (steps, local_steps))) for each in range(size)]


def nothing_to_load(
    folder: Path, rank: int, world_size: int, unreadable: Offer | None = None
) -> FileError:
    """Why there is no offer that all ranks have made; `unreadable` is one that all had made until
    another rank could not read it."""
    if unreadable is not None:
        return file_error(
            folder,
            f"a rank cannot read its state of step {unreadable[1]}, which is damaged there, and "
            "there is no earlier one that all ranks can read",
            advice="its own error names the file",
        )
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


# The state of a handle as `torch.distributed.checkpoint` can save it: by the number of the rank.
#
# That keeps one copy of what has the same name on several ranks, and takes it from any of them.
# The names in a state are the same on all ranks, and what they stand for is each rank's own.


PACKAGE = "torch.distributed.checkpoint"


class HasState(Protocol):
    """A handle."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any) -> None: ...


class StateByRank:
    """A handle's state by rank, with the two methods that make it `Stateful`."""

    def __init__(self, handle: HasState, rank: int, world_size: int) -> None:
        self._handle = handle
        self._name = name_of(rank, world_size)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state under a name that no other rank has.

        In a tuple it is one value to the checkpoint, so it may have other keys than the state that
        is there when it is loaded: of an exchange that was in flight.
        """
        return {self._name: (self._handle.state_dict(),)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`load_state_dict` of the handle, with this rank's state."""
        if self._name not in state:
            raise StateError(
                f"there is no {self._name!r} among the states of {sorted(state)}: those of another "
                "number of ranks are loaded with handle.load_checkpoint"
            )
        (own,) = state[self._name]
        self._handle.load_state_dict(own)


def name_of(rank: int, world_size: int) -> str:
    """The name of a rank's state in a checkpoint."""
    return f"{rank}-of-{world_size}"


def names_to_load(names: Iterable[str], key: str, rank: int, world_size: int) -> list[str]:
    """Which of the states under `key` a rank needs, of all names in a checkpoint: its own, or with
    another number of ranks those of all."""
    pattern = re.compile(re.escape(key) + r"\.(\d+)-of-(\d+)")
    found = [match.groups() for name in names if (match := pattern.fullmatch(name))]
    sizes = sorted({int(size) for _, size in found})
    if not sizes:
        raise StateError(
            f"rank {rank}: the checkpoint has no state by rank under {key!r}: save it with "
            f"dcp.save({{{key!r}: handle.by_rank}}, ...)"
        )
    if world_size in sizes:
        return [name_of(rank, world_size)]
    return [name_of(each, sizes[-1]) for each in range(sizes[-1])]


def refuse_shared_names(rank: int, world_size: int, *allowed: Any) -> None:
    """Raise StateError if a checkpoint of torch's asks for a state whose names all ranks share.

    `allowed` are the functions through which it may: what they return is right for it.
    """
    codes = {function.__code__ for function in allowed}
    frame = sys._getframe(1) if world_size > 1 else None
    while frame is not None and frame.f_code not in codes:
        if frame.f_globals.get("__name__", "").startswith(PACKAGE):
            raise StateError(
                f"rank {rank}: {PACKAGE} keeps one copy of what has the same name on several "
                "ranks, and each rank's state is its own: give it handle.by_rank instead of the "
                "handle (dcp.save({'oktopk': handle.by_rank}, ...) and the same with dcp.load), "
                "and in a state_dict() of your own call handle.by_rank.state_dict(), whose names "
                "have the rank"
            )
        frame = frame.f_back
