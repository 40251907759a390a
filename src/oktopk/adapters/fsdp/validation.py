# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of `attach_fsdp`, before a rank waits for another."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.fsdp.modules import ShardedModule, has_foreign_hook, param_groups, shard_group
from oktopk.utils.arguments import short_repr

MESH = (
    'mesh = init_device_mesh(device, (sites, ranks_per_site), mesh_dim_names=("replicate", '
    '"shard")), fully_shard(model, mesh=mesh["shard"]), and attach_fsdp(model, mesh["replicate"])'
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
        other = "use attach" if isinstance(model, DistributedDataParallel) else f"use {MESH}"
        raise TypeError(
            f"attach_fsdp needs a model that fully_shard was called with, got "
            f"{type(model).__name__}: {other}"
        )
    for name, module in model.named_modules():
        for group in param_groups(module) if isinstance(module, FSDPModule) else ():
            _check_group(name, group)
    _refuse_unmanaged(model)


def _check_group(name: str, group: Any) -> None:
    if group._is_hsdp or group.mesh_info.mesh.ndim != 1:
        raise ValueError(
            f"FSDP module {name!r} is on a mesh of {group.mesh_info.mesh.ndim} dimensions, where "
            "FSDP itself all-reduces gradients between replicas, densely, before attach_fsdp sees "
            f"them: shard over a mesh of one dimension. Use {MESH}"
        )
    if any(each.is_dtensor for each in group.fsdp_params):
        raise TypeError(
            f"FSDP module {name!r} has parameters that were DTensors before fully_shard (tensor "
            "parallelism): attach_fsdp needs parameters that only FSDP shards"
        )
    if has_foreign_hook(group):
        raise ValueError(
            f"FSDP module {name!r} has an all-reduce hook already: if it is that of attach_fsdp, "
            "close() its handle first"
        )


def _refuse_unmanaged(model: nn.Module) -> None:
    managed = {
        id(each.sharded_param)
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in param_groups(module)
        for each in group.fsdp_params
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in managed:
            raise ValueError(
                f"parameter {name!r} is not sharded by FSDP (ignored_params), so FSDP hands over "
                "no gradient of it and the replicas would drift apart: shard it too, or freeze it"
            )


def check_modules(modules: list[ShardedModule]) -> None:
    """Raise ValueError where nothing is trained, or not all is sharded over the same ranks."""
    if not modules:
        raise ValueError("no parameter of this model requires gradients: nothing is trained")
    first = dist.get_process_group_ranks(shard_group(modules[0]))
    for module in modules:
        ranks = dist.get_process_group_ranks(shard_group(module))
        if ranks != first:
            raise ValueError(
                f"FSDP modules {modules[0].name!r} and {module.name!r} are sharded over different "
                f"ranks, {first} and {ranks}: attach_fsdp needs one mesh for all of them"
            )


def as_group(replicate_group: Any) -> dist.ProcessGroup:
    """The process group of the replicas, also from a mesh of one dimension."""
    if isinstance(replicate_group, DeviceMesh):
        if replicate_group.ndim != 1:
            raise ValueError(
                f"replicate_group is a mesh of {replicate_group.ndim} dimensions: pass the one of "
                f"its dimensions that goes across replicas. Use {MESH}"
            )
        return replicate_group.get_group()
    if not isinstance(replicate_group, dist.ProcessGroup):
        raise TypeError(
            "replicate_group must be the process group, or the mesh of one dimension, of the ranks "
            f"that have the same shard of every replica, got {short_repr(replicate_group)}"
        )
    return replicate_group


def check_grid(replicas: list[int], shards: list[int]) -> None:
    """Raise ValueError unless replicas times shards are all ranks of the job, in order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if len(set(replicas) | set(shards)) != len(replicas) + len(shards) - 1:
        raise ValueError(
            f"rank {rank}: the replicate group {replicas} and the ranks {shards} that the model is "
            f"sharded over must have exactly this rank in common. Use {MESH}"
        )
    if len(replicas) * len(shards) != size:
        raise ValueError(
            f"{len(replicas)} replicas of {len(shards)} shards are {len(replicas) * len(shards)} "
            f"ranks, and the job has {size}: attach_fsdp needs all of them"
        )
    if shards != sorted(shards) or replicas != sorted(replicas):
        raise ValueError(
            f"rank {rank}: the ranks of a mesh must be in ascending order, got {shards} and "
            f"{replicas}. Use {MESH}"
        )
