# SPDX-License-Identifier: Apache-2.0
"""What the ranks tell each other before each exchange, so that they decide together.

A condition that differs between ranks must not guard a collective. So every rank tells what it
knows in one header of fixed size, and all of them decide from the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import ranks_text
from oktopk.utils.device import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """What one rank tells the others. Whole numbers: each field takes 8 bytes."""

    num_written: int
    """Parameters that something else than the optimizer has written since the last exchange."""

    fragment: int
    """The number of the fragment that is exchanged."""

    num_steps: int
    """Optimizer steps since the start, a load, or the last end of `finish`."""

    has_finished: int
    """1 if this rank only answers the others, in `finish`."""

    moves: int
    """A checksum of the weight change until the ranks have compared it; 0 afterwards, and if there
    is none."""


def tell(mine: Notice, comm: Comm, device: torch.device) -> list[Notice]:
    """What all ranks tell, in rank order. Header: 8 bytes for each field, to every other rank."""
    words = to_device(list(astuple(mine)), torch.int64, device)
    rows = comm.all_gather_header(words, stage="agreement").tolist()
    names = list(Notice.__dataclass_fields__)
    return [Notice(**dict(zip(names, row, strict=True))) for row in rows]


def by_value(values: Sequence[int], ranks: Sequence[int]) -> str:
    """`40 on ranks 0, 2 and 37 on rank 1`, of one value for each of the ranks."""
    having: dict[int, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        having.setdefault(value, []).append(rank)
    return " and ".join(f"{value} on {ranks_text(those)}" for value, those in having.items())
