# SPDX-License-Identifier: Apache-2.0
"""What `local_steps` needs of a model and an optimizer."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.adapters.local_steps.ranks import Ranks, ranks_of
from oktopk.adapters.local_steps.step_hooks import is_hooked, optimizers_of
from oktopk.adapters.parameters import ParameterLayout
from oktopk.adapters.policy import Policy
from oktopk.adapters.validation import check_optimizer
from oktopk.comm.communicator import Comm
from oktopk.engine.buckets import MAX_INDEXABLE
from oktopk.optim.flat_views import is_dtensor
from oktopk.settings import Settings


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards a part of it. Its import takes half a second: where nobody has imported
    it, it does not."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(each, fsdp.FSDPModule) for each in model.modules())


def parameters_of(
    model: nn.Module, group: Any, comm: Comm | None, timeout: float | None, policy: Policy
) -> tuple[ParameterLayout, Ranks]:
    """The layout of what a rank exchanges of the model, and with which ranks.

    TypeError or ValueError if it cannot be exchanged.
    """
    if is_sharded(model):
        from oktopk.adapters.local_steps.weight_shards import sharded_ranks, weight_shards

        layout = weight_shards(model, policy)
        ranks = sharded_ranks(layout, group, timeout)
    else:
        layout = ParameterLayout(dict(model.named_parameters()), policy)
        ranks = ranks_of(group, comm, timeout)
        for name, parameter in layout.parameters.items():
            _refuse_dtensor(name, parameter)
    return layout, ranks


def check_parameters(layout: ParameterLayout, settings: Settings) -> None:
    """Raise TypeError or ValueError for parameters that cannot be exchanged."""
    for name, parameter in layout.parameters.items():
        _check_dtype(name, parameter)
    if not layout.parameters:
        raise ValueError("no parameter of this model requires gradients: nothing is trained")
    numel = sum(layout.numel(name) for name in layout.parameters)
    if numel > MAX_INDEXABLE and settings.method != "dense":
        raise ValueError(
            f"a rank has {numel} trainable entries, and no more than {MAX_INDEXABLE} can be "
            "selected together, as indices are int32: use method='dense', or freeze some parameters"
        )


def check_buffers(model: nn.Module) -> None:
    """Raise TypeError for a buffer that cannot be sent from rank 0 to the others."""
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise TypeError(
                f"buffer {name!r} has layout {buffer.layout}: local_steps gives all ranks the "
                "buffers of rank 0, which must be dense; keep this one dense, or as a plain "
                "attribute (self.name = tensor), which every rank makes for itself"
            )


def refuse_auto_in_site(model: nn.Module, *, sharded: bool) -> None:
    """Raise ValueError for `density="auto"` if a site has several ranks: each would choose by its
    own clock."""
    if sharded:
        raise ValueError(
            "density='auto' does not work with FSDP2, whose ranks would choose by shard and not by "
            "site: give a density"
        )
    if isinstance(model, DistributedDataParallel) and dist.get_world_size(model.process_group) > 1:
        raise ValueError(
            "density='auto' does not work with DistributedDataParallel inside a site: its ranks "
            "would choose by their own clocks, and no longer have the same weights; give a density"
        )


def refuse_dense_exchange(model: nn.Module, optimizer: Any, ranks: Ranks) -> None:
    """Raise ValueError where the same ranks exchange whole gradients or weights in every step."""
    zero = sys.modules.get("torch.distributed.optim")
    found: list[Any] = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if zero is not None:
        kind = zero.ZeroRedundancyOptimizer
        found += [each for each in optimizers_of(optimizer) if isinstance(each, kind)]
    for each in found:
        theirs = dist.get_process_group_ranks(each.process_group)
        shared = sorted(set(theirs).intersection(ranks.members))
        if len(shared) > 1:
            raise ValueError(
                f"{type(each).__name__} keeps the weights of ranks {shared} the same in every "
                "step, densely, so local_steps over these ranks would save nothing: pass the bare "
                "module (model.module) and train that, with an optimizer of its own on every rank; "
                "or, where these are the ranks of one site, pass as `group` the ranks across sites"
            )


def check_sharded(*, sharded: bool, comm: object) -> None:
    """Raise ValueError for arguments that do not work with a model that FSDP2 shards."""
    if sharded and comm is not None:
        raise ValueError("comm does not work with FSDP2, whose shards need one each: pass group")


def _refuse_dtensor(name: str, parameter: Tensor) -> None:
    if is_dtensor(parameter):
        raise TypeError(
            f"parameter {name!r} is a DTensor that fully_shard has not made (tensor parallelism): "
            "local_steps needs a plain module, DistributedDataParallel, or FSDP2 inside a site"
        )


def _check_dtype(name: str, parameter: Tensor) -> None:
    if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
        raise TypeError(
            f"parameter {name!r} is {parameter.dtype}: local_steps exchanges fp16, bf16, fp32 and "
            "float64 parameters; freeze it, or keep it in one of these"
        )


def checked_optimizers(optimizer: Any, parameters: ParameterLayout) -> list[Optimizer]:
    """Those of `optimizers_of`. The innermost must train the model."""
    optimizers = optimizers_of(optimizer)
    if not optimizers:
        raise TypeError(f"expected an optimizer or a scheduler, got {type(optimizer).__name__}")
    advice = "make it from model.parameters(), after the model was moved to its device, or sharded"
    check_optimizer(optimizers[-1], parameters.parameters.values(), advice)
    if any(map(is_hooked, optimizers)):
        raise ValueError("this optimizer has local steps already: close() their handle first")
    return optimizers
