# SPDX-License-Identifier: Apache-2.0
"""`DDPParameterLayout`: the parameters DDP exchanges, and where they lie in its buckets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.ddp.communication_thread import ReadyBucket
from oktopk.adapters.parameters import ParameterLayout
from oktopk.adapters.policy import Policy
from oktopk.engine.buckets import Layout


class DDPParameterLayout(ParameterLayout):
    """Finds the named parameters in the buckets that DDP hands over."""

    def __init__(self, model: DistributedDataParallel, policy: Policy) -> None:
        managed = {id(parameter) for parameter in model._module_parameters}
        named = {n: p for n, p in model.module.named_parameters() if id(p) in managed}
        super().__init__(named, policy, may_be_unused=model.find_unused_parameters)

    def layout_of(self, buckets: list[ReadyBucket]) -> Layout:
        for ready in buckets:
            for parameter in ready.parameters:  # one that was frozen after DDP had taken it on
                self.parameters.setdefault(self._names[parameter], parameter)
        return [[self._names[p] for p in ready.parameters] for ready in buckets]

    def check_sizes(self, buckets: list[ReadyBucket], layout: Layout) -> None:
        """Raise where a bucket of DDP's is not as large as its parameters: all would be misread."""
        for ready, names in zip(buckets, layout, strict=True):
            numel = sum(self.parameters[name].numel() for name in names)
            if ready.buffer.numel() != numel:
                raise ValueError(
                    f"DDP's bucket {ready.index} has {ready.buffer.numel()} elements, and its "
                    f"parameters have {numel}: {names}; is one of them complex?"
                )

    def copies(self, buckets: list[ReadyBucket], layout: Layout) -> list[Tensor]:
        """A copy of DDP's gradients in the order of another layout."""
        parts = self._gradients(buckets)
        return [torch.cat([parts[name] for name in names]) for names in layout]

    def copy_back(self, copies: list[Tensor], buckets: list[ReadyBucket], layout: Layout) -> None:
        """Copy the averages from the copies back into DDP's buckets."""
        parts = self._gradients(buckets)
        for names, grad in zip(layout, copies, strict=True):
            for name, part in self.parts(grad, names).items():
                parts[name].copy_(part)

    def _gradients(self, buckets: list[ReadyBucket]) -> dict[str, Tensor]:
        parts = {}
        for ready, names in zip(buckets, self.layout_of(buckets), strict=True):
            parts |= self.parts(ready.buffer, names)
        return parts
