# SPDX-License-Identifier: Apache-2.0
"""How a rank finds the others: what they compare before they start, and the groups they
connect by.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.ddp_driver import DDPParameterLayout
from oktopk.adapters.parameters import ParameterLayout, time_limit
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import PROTOCOL, check_consistency_through_store
from oktopk.comm.failure import (
    FailureDetector,
    NoFailureDetector,
    StoreFailureDetector,
    detection_seconds,
    job_detector,
)
from oktopk.comm.simulated import single_rank_comm
from oktopk.comm.torch_transport import TorchTransport, as_process_group, new_transport
from oktopk.exchange.layout import UNSHARDED, Shards, shard_group
from oktopk.kernels.ready import make_ready
from oktopk.methods import cheapest, probe_kernels, probe_link
from oktopk.methods.base import Work
from oktopk.settings import Settings, num_kept
from oktopk.sparse import acc_dtype, common_acc_dtype
from oktopk.utils.console import announce
from oktopk.version import __version__

# What an adapter does with the other ranks before it starts: compare settings, and connect.


def describe_group(group: Any) -> dict[str, Any]:
    """Versions and process group, which must be the same on every rank."""
    return {
        "oktopk": __version__,
        "protocol": PROTOCOL,
        "world size": dist.get_world_size(group),
        "backend": dist.get_backend_config(group),
    }


def describe_parameters(layout: ParameterLayout) -> dict[str, Any]:
    """Order, shapes and dtypes of the parameters, which must be the same on every rank."""
    values: dict[str, Any] = {"order of parameters": " ".join(layout.parameters)}
    for name, p in layout.parameters.items():
        travels = "dense" if layout.is_dense(name) else "sparse"
        values[f"parameter {name!r}"] = f"{list(p.shape)} {p.dtype} {p.device.type} {travels}"
    return values


def agree_by_store(
    group: Any, timeout: float, values: dict[str, Any], call: str, prefix: str
) -> str:
    """Compare what all ranks are about to do, before any collective: ranks that differ abort."""
    transport = TorchTransport(group)
    return check_consistency_through_store(
        transport.store, dist.get_rank(), transport.global_ranks, timeout, values, call, prefix
    )


def connect(
    group: Any, timeout: float, comm: Comm | None, undo: ExitStack, *, on_cuda: bool
) -> tuple[Comm, FailureDetector]:
    """The communicator, over a new group of the same ranks unless one is given, and the failure
    detector.

    With a group of its own, no collective of DDP's or the user's mixes with those of the exchange.
    For a group of only some ranks, the others need not take part; but torch then asks that its
    ranks have made the same groups before.
    """
    ranks = dist.get_process_group_ranks(group)
    if comm is None:
        transport = new_transport(
            ranks,
            timeout,
            on_cuda=on_cuda,
            backend=dist.get_backend(group),
            whole_job=len(ranks) == dist.get_world_size(),
        )
        undo.callback(transport.close)
        comm = Comm(transport)
        store = transport.store
    else:
        store = TorchTransport(group).store
    shared = job_detector()
    if shared is not None and ranks == list(range(dist.get_world_size())):
        failure_detector = shared.share()
    else:
        seconds = detection_seconds(timeout)
        failure_detector = StoreFailureDetector(store(), dist.get_rank(), ranks, seconds)
    undo.callback(failure_detector.close)
    return comm, failure_detector


# Two axes of ranks: across replicas, and inside a replica, whose shards its ranks have.


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


# What `attach` compares with the other ranks, and what it measures for `method="auto"`.


log = logging.getLogger("oktopk")


def describe_model(model: DistributedDataParallel, layout: DDPParameterLayout) -> dict[str, Any]:
    """What must be the same on every rank besides the arguments: versions, group, parameters."""
    return {
        **describe_group(model.process_group),
        "find_unused_parameters": model.find_unused_parameters,
        "static_graph": model.static_graph,
        "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
        **describe_parameters(layout),
    }


def fastest_method(model: DistributedDataParallel, settings: Settings, comm: Comm) -> str:
    """The method with the shortest exchange by measured network and kernels, the same on all ranks.

    One choice for the model: its groups are alike in size, or there is only one.
    """
    device = next(model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    link, speed = probe_link(comm, device), probe_kernels(comm, device)
    kept, dtype = num_kept(numel, settings.density), common_acc_dtype(trained)
    work = Work(numel, kept, comm.size, settings.wire, dtype, short_bytes=settings.short_bytes)
    times = cheapest(work, link, speed)
    best = next(iter(times))
    if comm.rank == 0:
        predicted = ", ".join(f"{name} {1e3 * taken:.0f} ms" for name, taken in times.items())
        log.info(
            "auto: %s (predicted for an exchange: %s; latency %.2f ms, %.0f Mbit/s per rank)",
            best,
            predicted,
            1e3 * link.latency,
            8e-6 * link.bandwidth,
        )
    return best


# How the ranks of `local_steps` find each other: across sites and, with FSDP2, inside a site.


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


# Compile the kernels before a model is attached, while no rank waits inside a collective.


def compile_kernels(parameters: Iterable[Tensor], *, tell: bool) -> None:
    """Have the kernels ready that the sums for these parameters need; say how long it took.

    Only for CPUs: Triton's kernels are compiled for the sizes that they are launched with.
    """
    compiled = make_ready(acc_dtype(p) for p in parameters if p.device.type == "cpu")
    if compiled is not None and tell:
        announce(str(compiled))
