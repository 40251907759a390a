# SPDX-License-Identifier: Apache-2.0
"""DiLoCo (Douillard et al., 2023): many local steps, then an outer step on the weight changes.

Every rank trains alone with its own optimizer. Every H steps the ranks average the changes of their
weights since the last exchange; an outer optimizer, SGD with Nesterov momentum, takes the average
for a gradient, and all ranks continue from the weights it makes. The state of the inner optimizer
stays where it is.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from oktopk.baselines.base import Baseline, BaselineOptions
from oktopk.baselines.hooks import dense_bytes
from oktopk.comm.broadcast import broadcast_
from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import TorchTransport


class DiLoCo(Baseline):
    """The bare model; the exchange happens in `optimizer.step()`, every few steps."""

    outer_lr, outer_momentum = 0.7, 0.9  # as in the paper

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: BaselineOptions) -> None:
        super().__init__(model, options)
        self.module, self.optimizer = model, optimizer
        self._comm = Comm(TorchTransport())
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._start_alike()
        self._anchors = [nn.Parameter(p.detach().clone()) for p in self._parameters]
        momentum = self.outer_momentum
        self._outer = SGD(self._anchors, lr=self.outer_lr, momentum=momentum, nesterov=momentum > 0)
        self._local_steps = 0
        self._seconds = 0.0
        optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _start_alike(self) -> None:
        """Give every rank the weights and buffers of rank 0, as DDP does."""
        broadcast_([*self.module.parameters(), *self.module.buffers()], self._comm, stage="start")

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        self._local_steps += 1
        self._seconds = 0.0
        if self._local_steps % self.options.every:
            return
        started = time.perf_counter()
        changes = [a - p for a, p in zip(self._anchors, self._parameters, strict=True)]
        mean = self._mean(torch.cat([change.flatten() for change in changes]))
        parts = mean.split([change.numel() for change in changes])
        for anchor, part in zip(self._anchors, parts, strict=True):
            anchor.grad = part.view_as(anchor)
        self._outer.step()
        for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
            parameter.copy_(anchor)
        self._seconds = time.perf_counter() - started

    def _mean(self, flat: Tensor) -> Tensor:
        """The mean of the weight changes of all ranks, with the same bits on every rank."""
        return self._comm.all_reduce_(flat, stage="outer") / self._comm.size

    def bytes_sent(self, step: int) -> int:
        """All weight changes every few steps."""
        if (step + 1) % self.options.every:
            return 0
        return dense_bytes(4)(self.shapes, self.options.world_size)

    @property
    def weights_agree(self) -> bool:
        return self._local_steps % self.options.every == 0

    @property
    def settings(self) -> dict[str, Any]:
        outer = {"outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum}
        return {"every": self.options.every} | outer

    @property
    def waits(self) -> dict[str, float]:
        return {"optimizer": self._seconds}
