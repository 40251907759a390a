# SPDX-License-Identifier: Apache-2.0
"""`Baseline`: a model and an optimizer with an exchange that is not ours."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.comm.ledger import dense_allreduce
from oktopk.stats import StepStats

Shapes = list[tuple[int, ...]]

WARMUP_SHARE, MOST_WARMUP = 0.1, 1000
"""Dense steps at first, for baselines that have them: the share of the run that the documentation
of PowerSGD suggests to begin with, and at most its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineOptions:
    """What a baseline may need to know."""

    world_size: int
    warmup_steps: int
    """Dense steps at the start, for those that have them."""

    every: int
    """Steps between exchanges, for those that do not exchange at every step."""

    density: float
    """Fraction of the entries that is sent, for those that send a part."""

    ddp_arguments: dict[str, Any]
    """Arguments for `DistributedDataParallel`."""


class Baseline(ABC):
    """A module to call, an optimizer to step, and what each step sends."""

    module: nn.Module
    """Called in the forward pass: the model itself, or wrapped in DDP."""

    optimizer: Optimizer

    def __init__(self, model: nn.Module, options: BaselineOptions) -> None:
        self.options = options
        self.shapes: Shapes = [tuple(p.shape) for p in model.parameters()]
        self.numel = sum(p.numel() for p in model.parameters())
        self.step = 0
        """Finished steps."""

    @abstractmethod
    def bytes_sent(self, step: int) -> int:
        """Bytes that a rank sends in a step, by the algorithm."""

    def no_sync(self) -> AbstractContextManager[object]:
        """A context for backward passes whose gradients are not exchanged yet."""
        if isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()
        return nullcontext()

    def after_backward(self) -> None:  # noqa: B027 - some exchange nothing in backward
        """Called when backward has returned, once per step."""

    @property
    def waits(self) -> dict[str, float]:
        """Seconds that the last step waited for the exchange, by the part of the step."""
        return {}

    @property
    def weights_agree(self) -> bool:
        """Whether all ranks have the same weights now."""
        return True

    @property
    def settings(self) -> dict[str, Any]:
        """What it was attached with, for the record of a run."""
        return {}

    def finish_step(self) -> StepStats:
        """Count the step, after `optimizer.step()`. Returns what it sent."""
        sent = self.bytes_sent(self.step)
        stats = dense_stats(self.step, self.numel, self.options.world_size, sent)
        self.step += 1
        return replace(stats, exposed=sum(self.waits.values()))


def dense_stats(step: int, numel: int, world_size: int, bytes_sent: int) -> StepStats:
    """What a step did that selected nothing."""
    return StepStats(
        step=step,
        phase="dense",
        numel=numel,
        k=numel,
        local=numel,
        result=numel,
        local_threshold=0.0,
        global_threshold=0.0,
        imbalance=1.0,
        bytes_sent=bytes_sent,
        bytes_header=0,
        bytes_received=bytes_sent,
        bytes_dense=dense_allreduce(4 * numel, world_size).sent,
        entries_sent=0,
        messages=0,
        skipped=False,
        select=0.0,
        exchange=0.0,
        scatter=0.0,
        exposed=0.0,
    )


class BackwardWait:
    """How long a backward pass waited for the exchange, after the last gradient was computed."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        self._last_gradient = 0.0
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, _: object) -> None:
        self._last_gradient = time.perf_counter()

    def measure(self) -> None:
        """Called when backward has returned."""
        self.seconds = time.perf_counter() - self._last_gradient
