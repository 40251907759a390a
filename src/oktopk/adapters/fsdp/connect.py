"""The two axes of an FSDP model: a communicator across replicas, and one inside the site."""

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
    """The ranks that have the same shard: what goes between sites."""

    shards: Comm
    """The ranks that have the other shards of the same replica."""

    failure_detector: FailureDetector


def connect_axes(
    replicas: list[int], shards: list[int], timeout: float, undo: ExitStack, device: torch.device
) -> Axes:
    """Connect both axes. The failure detector watches all ranks: a failure on one axis soon stops
    the other."""
    on_cuda = device.type == "cuda"
    everyone, failure_detector = connect(dist.group.WORLD, timeout, None, undo, on_cuda=on_cuda)
    leaders = torch.tensor([replicas[0], shards[0]], device=device)
    table = everyone.all_gather_header(leaders, stage="start").tolist()
    across = everyone.split(_grouped([row[0] for row in table]))
    inside = everyone.split(_grouped([row[1] for row in table]))
    # `split` adds to the ledger of the whole; here the two axes are counted apart
    return Axes(everyone, Comm(across.transport), Comm(inside.transport), failure_detector)


def _grouped(leaders: list[int]) -> list[list[int]]:
    """The ranks by the first rank of their group."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, leader in enumerate(leaders):
        groups[leader].append(rank)
    return list(groups.values())
