# SPDX-License-Identifier: Apache-2.0
"""`WeightShards`: FSDP2 inside a site. A rank exchanges its own shards of the weights.

The ranks that have the same shard at the other sites have it in the same size, as their meshes are
the same. So no padding is needed, and a shard of no entries is as good as any other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oktopk.adapters.fsdp.modules import reshard, shard_ranks, sharded_modules
from oktopk.adapters.fsdp.parameters import ShardLayout
from oktopk.adapters.fsdp.validation import (
    LOCAL_STEPS,
    as_group,
    check_grid,
    check_modules,
    check_sharding,
)
from oktopk.adapters.local_steps.ranks import ShardedRanks
from oktopk.adapters.parameters import ParameterLayout
from oktopk.adapters.policy import Policy
from oktopk.adapters.validation import time_limit


class WeightShards(ShardLayout):
    """This rank's shards. Which parameters travel dense is decided by whole tensors."""

    def stored(self) -> dict[str, Tensor]:
        """This rank's shards, by name.

        Whoever writes to them wants FSDP to gather them anew: after a forward without a backward it
        still has the root's parameters whole, as they were.
        """
        reshard(self._model)
        return super().stored()

    @property
    def device(self) -> torch.device:
        """Where the optimizer has its weights: with CPU offload, not where gradients are made."""
        return ParameterLayout.device.__get__(self)

    def numel(self, name: str) -> int:
        return self.shard(name).numel()


def weight_shards(model: nn.Module, policy: Policy) -> WeightShards:
    """The layout of a model that FSDP2 shards; TypeError or ValueError if it cannot be used."""
    reshard(model)
    check_sharding(model, LOCAL_STEPS)
    modules = sharded_modules(model)
    check_modules(modules, LOCAL_STEPS)
    return WeightShards(model, modules, policy)


def sharded_ranks(parameters: WeightShards, group: Any, timeout: float | None) -> ShardedRanks:
    """The ranks of the job, where `group` goes across sites; ValueError if they are no grid."""
    across = dist.get_process_group_ranks(as_group(group, LOCAL_STEPS))
    inside = shard_ranks(parameters.modules[0])
    check_grid(across, inside, LOCAL_STEPS)
    everyone = dist.group.WORLD
    limit = time_limit(timeout, everyone)
    return ShardedRanks(group=everyone, comm=None, timeout=limit, across=across, inside=inside)
