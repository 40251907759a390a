# SPDX-License-Identifier: Apache-2.0
"""Post-local SGD (Lin et al., 2018), as PyTorch's documentation shows it.

Gradients are averaged over all ranks in the first steps. After that every rank steps alone, and the
weights are averaged every few steps.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.baselines.base import BackwardWait, Baseline, BaselineOptions
from oktopk.baselines.hooks import dense_bytes


class TimedAverager(PeriodicModelAverager):
    """PyTorch's averager, with the seconds of its last call."""

    def __init__(self, period: int, warmup_steps: int) -> None:
        super().__init__(period=period, warmup_steps=warmup_steps)
        self.seconds = 0.0

    def average_parameters(self, params: Iterable[Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        started = time.perf_counter()
        super().average_parameters(params)
        self.seconds = time.perf_counter() - started


class PostLocalSgd(Baseline):
    """DDP with the post-local SGD hook; every rank is a group of its own after the warm-up."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: BaselineOptions) -> None:
        super().__init__(model, options)
        self.module = DistributedDataParallel(model, **options.ddp_arguments)
        alone, _ = dist.new_subgroups(group_size=1)
        state = PostLocalSGDState(
            process_group=None, subgroup=alone, start_localSGD_iter=options.warmup_steps
        )
        self.module.register_comm_hook(state, post_localSGD_hook)
        self._averager = TimedAverager(options.every, options.warmup_steps)
        with warnings.catch_warnings():  # torch.distributed.optim uses what torch has deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import PostLocalSGDOptimizer
        self.optimizer = PostLocalSGDOptimizer(optim=optimizer, averager=self._averager)
        self._wait = BackwardWait(model)

    def after_backward(self) -> None:
        self._wait.measure()

    def bytes_sent(self, step: int) -> int:
        """All gradients in the warm-up, then all weights every few steps."""
        options = self.options
        local_step = step - options.warmup_steps
        if local_step >= 0 and local_step % options.every:
            return 0
        return dense_bytes(4)(self.shapes, options.world_size)

    @property
    def weights_agree(self) -> bool:
        local_step = self.step - 1 - self.options.warmup_steps
        return local_step < 0 or local_step % self.options.every == 0

    @property
    def settings(self) -> dict[str, Any]:
        return {"every": self.options.every, "warmup_steps": self.options.warmup_steps}

    @property
    def waits(self) -> dict[str, float]:
        return {"backward": self._wait.seconds, "optimizer": self._averager.seconds}
