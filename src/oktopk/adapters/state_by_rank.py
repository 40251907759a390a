# SPDX-License-Identifier: Apache-2.0
"""The state of a handle as `torch.distributed.checkpoint` can save it: by the number of the rank.

That keeps one copy of what has the same name on several ranks, and takes it from any of them. The
names in a state are the same on all ranks, and what they stand for is each rank's own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, Protocol

from oktopk.errors import StateError

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
                "handle (dcp.save({'oktopk': handle.by_rank}, ...) and the same with dcp.load)"
            )
        frame = frame.f_back
