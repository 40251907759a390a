# SPDX-License-Identifier: Apache-2.0
"""Two axes of ranks: across replicas, and inside a replica, whose shards its ranks have."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from oktopk.adapters.connect import connect
from oktopk.comm.communicator import Comm
from oktopk.comm.failure_detector import FailureDetector


@dataclass(frozen=True, slots=True)
class Axes:
    """The communicators of a rank, each with a ledger of its own."""

    everyone: Comm
    """All ranks of the job. Closing it closes the others."""

    replicas: Comm
    """The ranks that have the same shard."""

    shards: Comm
    """The ranks that have the other shards of the same replica."""

    failure_detector: FailureDetector


def connect_axes(
    inside: int, across: int | None, timeout: float, undo: ExitStack, device: torch.device
) -> Axes:
    """Connect both axes. Every rank of the job must call it.

    `inside` is the same number on all ranks of a replica, and another for other replicas. `across`
    is the lowest rank of those that are to have this rank's shard, if the caller knows: all ranks
    raise ValueError if it is another. The failure detector watches all ranks: a failure on one axis
    soon stops the other.
    """
    everyone, failure_detector = connect(
        dist.group.WORLD, timeout, None, undo, on_cuda=device.type == "cuda"
    )
    mine = torch.tensor([inside, -1 if across is None else across], device=device)
    table = everyone.all_gather_header(mine, stage="start").tolist()
    rows = _grouped([row[0] for row in table])
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"all replicas must have equally many ranks, and they have {rows}")
    columns = [list(column) for column in zip(*rows, strict=True)]
    for column in columns:
        if {table[rank][1] for rank in column} - {-1, column[0]}:
            raise ValueError(
                f"ranks {column} have the same shard, and some of them are in other replicate "
                "groups: those must go across replicas, in the order of their ranks"
            )
    # `split` adds to the ledger of the whole; here the two axes are counted apart
    return Axes(
        everyone,
        Comm(everyone.split(columns).transport),
        Comm(everyone.split(rows).transport),
        failure_detector,
    )


def _grouped(keys: list[int]) -> list[list[int]]:
    """The ranks that have the same key, in the order of their first rank."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, key in enumerate(keys):
        groups[key].append(rank)
    return list(groups.values())
