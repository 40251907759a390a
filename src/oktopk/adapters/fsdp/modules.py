# SPDX-License-Identifier: Apache-2.0
"""FSDP's parameter groups: which parameters it reduces together, and where they lie in the result.

`fully_shard` makes one group of the parameters of a module that no inner FSDP module has. In
backward it reduce-scatters their gradients as one flat vector and calls the all-reduce hook with
this rank's part of it, in which every parameter is padded to equal shares. FSDP has no public names
for this; all that is read of its internals is read here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from oktopk.engine.saved_state import clean_name

Hook = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class ShardedModule:
    """The parameters that one FSDP module reduces together."""

    name: str
    module: FSDPModule
    group: Any
    """FSDP's own record, an `FSDPParamGroup`."""

    parameters: dict[str, Any]
    """By name, the `FSDPParam` of those that require gradients, in FSDP's order."""

    @property
    def numel(self) -> int:
        """Entries of the flat vector that the hook gets, with padding."""
        return sum(padded_numel(parameter) for parameter in self.parameters.values())

    @property
    def all_reduces(self) -> bool:
        """What `set_requires_all_reduce` said last."""
        return self.group.all_reduce_grads

    @property
    def divides_by_hand(self) -> bool:
        """Whether `set_gradient_divide_factor` was called: FSDP then divides by that alone."""
        return self.group.gradient_divide_factor is not None

    @property
    def device(self) -> torch.device:
        """Where gradients are computed; with CPU offload the parameters are elsewhere."""
        return self.group.device

    def hook(self, hook: Hook | None) -> None:
        """Let FSDP call this with the reduced gradient; None is nothing."""
        self.group._all_reduce_hook = hook


def refuse_backward(flat: Tensor) -> None:
    """The hook that `close` leaves: without it every replica would train on its own, unnoticed."""
    raise RuntimeError(
        "the handle of this FSDP model was closed: call attach_fsdp again, or "
        "model.set_all_reduce_hook(None) to train every replica on its own"
    )


def has_foreign_hook(group: Any) -> bool:
    """Whether an FSDP parameter group has a hook that `attach_fsdp` must not replace."""
    return group._all_reduce_hook not in (None, refuse_backward)


def padded_numel(parameter: Any) -> int:
    """Entries of a parameter in the flat vector of every rank."""
    return parameter.padded_sharded_param_size.numel()


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
    """The FSDP modules of a model that have parameters to train, in an order of their names.

    The parameters must be sharded, as they are between a backward and the next forward.
    """
    names = {id(p): clean_name(name) for name, p in model.named_parameters()}
    found, seen = [], set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in param_groups(module):
            if id(group) in seen:  # modules of one list, fully_shard([a, b]), share their groups
                continue
            seen.add(id(group))
            parameters = {
                names[id(each.sharded_param)]: each
                for each in group.fsdp_params
                if each.sharded_param.requires_grad
            }
            if parameters:
                found.append(ShardedModule(clean_name(name), module, group, parameters))
    return found


def is_in_backward(module: ShardedModule) -> bool:
    """Whether FSDP's own callback at the end of backward has still to run."""
    return module.module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def param_groups(module: FSDPModule) -> list[Any]:
    """FSDP's records of the parameters that it reduces together."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    only = state._fsdp_param_group  # of older versions of torch
    return [] if only is None else [only]


def is_root(model: Any) -> bool | None:
    """Whether no other FSDP module contains this one; None before the first forward."""
    return model._get_fsdp_state()._is_root


def reshard(model: nn.Module) -> None:
    """Let the model hold its shards: after a forward, FSDP leaves the root's parameters whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard_ranks(sharded: ShardedModule) -> list[int]:
    """The ranks of the job that have the shards of one replica, this one among them."""
    return dist.get_process_group_ranks(sharded.group.mesh_info.shard_process_group)
