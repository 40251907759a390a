# SPDX-License-Identifier: Apache-2.0
"""How the ranks of `local_steps` find each other: across sites and, with FSDP2, inside a site."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from oktopk.adapters.axes import connect_axes
from oktopk.adapters.connect import agree_by_store, connect, describe_group
from oktopk.adapters.parameters import ParameterLayout
from oktopk.adapters.validation import time_limit
from oktopk.comm.communicator import Comm
from oktopk.comm.failure_detector import FailureDetector, NoFailureDetector
from oktopk.comm.process_groups import as_process_group
from oktopk.comm.simulated import single_rank_comm
from oktopk.comm.torch_transport import TorchTransport
from oktopk.engine.shards import UNSHARDED, Shards, shard_group

WORLD_SIZES = (
    "WORLD_SIZE",
    "OKTOPK_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
"""Variables that launchers set to the number of ranks, as `oktopk.launch` reads them."""


@dataclass(frozen=True, slots=True)
class Links:
    """A rank that is connected."""

    comm: Comm
    """The ranks that exchange."""

    everyone: Comm
    """Those that decide together: all shards of a model, where it is sharded."""

    shards: list[Shards]
    """For each fragment, its shards inside this site."""

    failure_detector: FailureDetector


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Ranks that have the whole model each, before they are connected."""

    group: Any
    """The process group whose store the ranks share; None for simulated ranks, or one process."""

    comm: Comm | None
    timeout: float

    def describe(self) -> dict[str, Any]:
        """What must be the same on every rank."""
        return {} if self.group is None else describe_group(self.group)

    @property
    def is_first(self) -> bool:
        """Whether this rank says what all of them do."""
        if self.group is None:
            return self.comm is None or self.comm.rank == 0
        return dist.get_rank(self.group) == 0

    @property
    def members(self) -> list[int]:
        """The ranks of the job that exchange; none of simulated ranks, or without a group."""
        return [] if self.group is None else dist.get_process_group_ranks(self.group)

    def refuse_late_group(self) -> None:
        """Raise ValueError for a process group that was made after the call that found none."""
        alone = self.group is None and self.comm is None
        if alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"a process group of {dist.get_world_size()} ranks was made after local_steps, "
                "which found none, so this rank trains alone: call init_process_group first, then "
                "local_steps"
            )

    def agree(self, values: dict[str, Any], call: str, prefix: str) -> str:
        """Compare values with the other ranks. Without a store, only the first exchange does."""
        if self.group is None:
            return prefix
        return agree_by_store(self.group, self.timeout, values, call, prefix)

    def connect(self, fragments: Sequence[ParameterLayout], undo: ExitStack) -> Links:
        """Connect with the other ranks. Collective."""
        if self.group is None:
            comm, detector = self.comm or single_rank_comm(), NoFailureDetector()
        else:
            on_cuda = any(p.is_cuda for each in fragments for p in each.parameters.values())
            comm, detector = connect(self.group, self.timeout, self.comm, undo, on_cuda=on_cuda)
        return Links(comm, comm, [UNSHARDED] * len(fragments), detector)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedRanks(Ranks):
    """All ranks of the job, which have one shard of the model of their site each."""

    across: list[int]
    """Those that have this rank's shard, one at every site."""

    inside: list[int]
    """Those of this site."""

    @property
    def members(self) -> list[int]:
        return self.across

    def describe(self) -> dict[str, Any]:
        shape = {"sites": len(self.across), "shards": len(self.inside)}
        return Ranks.describe(self) | shape

    def connect(self, fragments: Sequence[ParameterLayout], undo: ExitStack) -> Links:
        device = fragments[0].device
        axes = connect_axes(self.inside[0], self.across[0], self.timeout, undo, device)
        shards = [shard_group(axes.shards, each.num_sparse, device) for each in fragments]
        return Links(axes.replicas, axes.everyone, list(shards), axes.failure_detector)


def ranks_of(group: Any, comm: Comm | None, timeout: float | None) -> Ranks:
    """The ranks of a process group or of a communicator, that have the whole model each."""
    if comm is None:
        if group is None and not dist.is_initialized():
            _refuse_alone()
        default = dist.group.WORLD if dist.is_initialized() else None
        group = default if group is None else as_process_group("group", group)
    elif isinstance(comm.transport, TorchTransport):
        group = comm.transport.group or dist.group.WORLD
    else:
        group = None
    return Ranks(group=group, comm=comm, timeout=time_limit(timeout, group))


def _refuse_alone() -> None:
    """Raise ValueError in a job of several ranks: without a process group each trains alone."""
    for name in WORLD_SIZES:
        size = os.environ.get(name, "1")
        if size.isdecimal() and int(size) > 1:
            raise ValueError(
                f"{name}={size} says that this job has {size} ranks, and there is no process group "
                "yet, so each of them would train alone: call torch.distributed.init_process_group "
                f"before local_steps; where each is to train alone, unset {name}"
            )
