# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of `attach_fsdp`, before a rank waits for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.fsdp.modules import ShardedModule, has_foreign_hook, param_groups, shard_ranks
from oktopk.comm.process_groups import as_process_group


@dataclass(frozen=True, slots=True)
class Caller:
    """A function that takes FSDP models, for messages."""

    name: str
    argument: str
    """What it calls the ranks that have the same shard of every replica."""

    example: str

    @property
    def mesh(self) -> str:
        """How meshes, `fully_shard` and the call fit together."""
        return (
            "mesh = init_device_mesh(device, (sites, ranks_per_site), "
            'mesh_dim_names=("replicate", "shard")), fully_shard(model, mesh=mesh["shard"]), and '
            f"{self.example}"
        )


ATTACH = Caller("attach_fsdp", "replicate_group", 'attach_fsdp(model, mesh["replicate"])')
LOCAL_STEPS = Caller(
    "local_steps", "group", 'local_steps(model, optimizer, group=mesh["replicate"])'
)


def refuse_auto(**arguments: Any) -> None:
    """Raise ValueError for `auto`, which only `attach` has."""
    for name, value in arguments.items():
        if isinstance(value, str) and value == "auto":
            raise ValueError(f"attach_fsdp has no {name}='auto', as attach has: give a {name}")


def check_model(model: Any) -> None:
    """Raise for a model, or a version of torch, that cannot work, naming what is in the way."""
    if not hasattr(FSDPModule, "set_all_reduce_hook"):
        raise RuntimeError(f"attach_fsdp needs torch 2.7 or newer, this is {torch.__version__}")
    if isinstance(getattr(model, "_orig_mod", None), FSDPModule):
        raise TypeError("attach_fsdp needs the model itself: call it before torch.compile")
    if not isinstance(model, FSDPModule) or not isinstance(model, nn.Module):
        other = "use attach" if isinstance(model, DistributedDataParallel) else f"use {ATTACH.mesh}"
        raise TypeError(
            f"attach_fsdp needs a model that fully_shard was called with, got "
            f"{type(model).__name__}: {other}"
        )
    check_sharding(model, ATTACH)
    for name, group in _groups(model):
        if has_foreign_hook(group):
            raise ValueError(
                f"FSDP module {name!r} has an all-reduce hook already: if it is that of "
                "attach_fsdp, close() its handle first"
            )


def check_sharding(model: nn.Module, caller: Caller) -> None:
    """Raise where a parameter is not sharded by FSDP alone, over a mesh of one dimension."""
    for name, group in _groups(model):
        if group._is_hsdp or group.mesh_info.mesh.ndim != 1:
            raise ValueError(
                f"FSDP module {name!r} is on a mesh of {group.mesh_info.mesh.ndim} dimensions, "
                "where FSDP itself all-reduces gradients between replicas, densely: shard over a "
                f"mesh of one dimension. Use {caller.mesh}"
            )
        if any(each.is_dtensor for each in group.fsdp_params):
            raise TypeError(
                f"FSDP module {name!r} has parameters that were DTensors before fully_shard "
                f"(tensor parallelism): {caller.name} needs parameters that only FSDP shards"
            )
    _refuse_unmanaged(model)


def _groups(model: nn.Module) -> list[tuple[str, Any]]:
    """FSDP's records of the parameters that it reduces together, with the names of modules."""
    return [
        (name, group)
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
        for group in param_groups(module)
    ]


def _refuse_unmanaged(model: nn.Module) -> None:
    managed = {id(each.sharded_param) for _, group in _groups(model) for each in group.fsdp_params}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in managed:
            raise ValueError(
                f"parameter {name!r} is not sharded by FSDP (ignored_params), so FSDP reduces no "
                "gradient of it and the ranks would drift apart: shard it too, or freeze it"
            )


def check_modules(modules: list[ShardedModule], caller: Caller = ATTACH) -> None:
    """Raise ValueError where nothing is trained, or not all is sharded over the same ranks."""
    if not modules:
        raise ValueError("no parameter of this model requires gradients: nothing is trained")
    first = shard_ranks(modules[0])
    for module in modules:
        ranks = shard_ranks(module)
        if ranks != first:
            raise ValueError(
                f"FSDP modules {modules[0].name!r} and {module.name!r} are sharded over different "
                f"ranks, {first} and {ranks}: {caller.name} needs one mesh for all of them"
            )


def as_group(replicas: Any, caller: Caller = ATTACH) -> dist.ProcessGroup:
    """The process group of the replicas, also from a mesh of one dimension."""
    try:
        return as_process_group(caller.argument, replicas)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{error}. It must have the ranks that have the same shard of every replica. Use "
            f"{caller.mesh}"
        ) from None


def check_grid(replicas: list[int], shards: list[int], caller: Caller = ATTACH) -> None:
    """Raise ValueError unless replicas times shards are all ranks of the job, in order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if len(set(replicas) | set(shards)) != len(replicas) + len(shards) - 1:
        raise ValueError(
            f"rank {rank}: the {caller.argument} {replicas} and the ranks {shards} that the model "
            f"is sharded over must have exactly this rank in common. Use {caller.mesh}"
        )
    if len(replicas) * len(shards) != size:
        raise ValueError(
            f"{len(replicas)} replicas of {len(shards)} shards are {len(replicas) * len(shards)} "
            f"ranks, and the job has {size}: {caller.name} needs all of them"
        )
    if shards != sorted(shards) or replicas != sorted(replicas):
        raise ValueError(
            f"rank {rank}: the ranks of a mesh must be in ascending order, got {shards} and "
            f"{replicas}. Use {caller.mesh}"
        )
