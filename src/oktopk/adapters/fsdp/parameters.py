# SPDX-License-Identifier: Apache-2.0
"""`ShardLayout`: this rank's shards of the parameters, and where FSDP's flat vectors have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oktopk.adapters.fsdp.modules import ShardedModule, is_root, padded_numel
from oktopk.adapters.parameters import ParameterLayout
from oktopk.adapters.policy import Policy
from oktopk.engine.buckets import Layout
from oktopk.optim.flat_views import local_shard
from oktopk.sparse import acc_dtype


class ShardLayout(ParameterLayout):
    """One bucket for each FSDP module. Which parameters travel dense is decided by whole tensors.

    A parameter takes as many entries on every rank: where its rows cannot be divided evenly, those
    at its end are padding, whose gradient is zero. Nothing of it is ever selected.
    """

    def __init__(self, model: nn.Module, modules: list[ShardedModule], policy: Policy) -> None:
        self._sharded: dict[str, Any] = {}
        for module in modules:
            self._sharded |= module.parameters
        super().__init__(dict(model.named_parameters()), policy)
        self._model = model
        self.modules = modules
        self.layout: Layout = [list(module.parameters) for module in modules]

    @property
    def device(self) -> torch.device:
        """Where gradients are computed; with CPU offload the parameters are elsewhere."""
        return self.modules[0].device

    @property
    def is_inside_another(self) -> bool:
        """Whether the model is a part of another FSDP model. It is known after a forward."""
        return is_root(self._model) is False

    def stored(self) -> dict[str, Tensor]:
        """This rank's shards, by name."""
        return {name: self.shard(name) for name in self.parameters}

    def marks(self) -> dict[str, tuple[int, int]]:
        marks = {}
        for name in self.parameters:
            whole = self._sharded[name].sharded_param
            shard = (
                whole._local_tensor
            )  # a write to a DTensor is not counted there, nor the reverse
            marks[name] = (whole._version + shard._version, shard.data_ptr())
        return marks

    def shard(self, name: str) -> Tensor:
        """This rank's shard of a parameter, without padding."""
        return local_shard(self._sharded[name].sharded_param.detach())

    def zeros(self, name: str) -> Tensor:
        """A residual of zero, in the shape of this rank's shard."""
        shard = self.shard(name)
        return torch.zeros(shard.shape, dtype=acc_dtype(shard), device=self.device)

    def numel(self, name: str) -> int:
        return padded_numel(self._sharded[name])

    def views(self, flat: Tensor, names: list[str]) -> dict[str, Tensor]:
        """The parts of a flat bucket in the shapes of this rank's shards, without padding."""
        return {
            name: part[: self.shard(name).numel()].view(self.shard(name).shape)
            for name, part in self.parts(flat, names).items()
        }
