# SPDX-License-Identifier: Apache-2.0
"""`Baseline`: a model and an optimizer with an exchange that is not ours; plain DDP and
PyTorch's hooks.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as default_hooks
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as powersgd
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.comm.communicator import dense_allreduce
from oktopk.stats import StepStats

# `Baseline`: a model and an optimizer with an exchange that is not ours.


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


# Plain DDP, and DDP with the communication hooks that come with PyTorch.


MIN_COMPRESSION = 2  # PowerSGD's own default: it compresses what becomes at least this much smaller
ONE_BUCKET = 2**20  # MB
FIRST_POWERSGD_STEP = 2  # the earliest that it accepts: DDP rebuilds its buckets after the first

Register = Callable[[DistributedDataParallel, int], None]
"""Registers the hook on a model; the number is that of dense steps at the start."""
BytesSent = Callable[[Shapes, int], int]
"""Returns the bytes that a rank sends in a step, from the tensors' shapes and the world size."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A communication hook of PyTorch, or none."""

    register: Register
    bytes_sent: BytesSent
    has_warmup: bool = False
    """Whether it starts with dense steps."""

    one_bucket: bool = False
    """Whether it needs all gradients in one bucket of DDP."""


def dense_bytes(itemsize: int) -> BytesSent:
    """The bytes of an allreduce of all gradients with this many bytes each."""

    def bytes_sent(shapes: Shapes, size: int) -> int:
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        return dense_allreduce(itemsize * numel, size).sent

    return bytes_sent


def _no_hook(_: DistributedDataParallel, __: int) -> None:
    """Leave DDP as it is."""


def without_state(hook: Callable[[Any, Any], Future[Tensor]]) -> Register:
    """Registers a communication hook that has no state."""

    def register(model: DistributedDataParallel, _: int) -> None:
        model.register_comm_hook(None, hook)

    return register


def _powersgd(rank: int) -> Hook:
    def register(model: DistributedDataParallel, warmup_steps: int) -> None:
        logging.getLogger(powersgd.__name__).setLevel(logging.WARNING)
        first = max(FIRST_POWERSGD_STEP, warmup_steps)
        state = powersgd.PowerSGDState(None, rank, start_powerSGD_iter=first)
        model.register_comm_hook(state, powersgd.powerSGD_hook)

    def bytes_sent(shapes: Shapes, size: int) -> int:
        """Count two factors for every matrix that they make small enough, and the rest dense."""
        total = 0
        for shape in shapes:
            numel = torch.Size(shape).numel()
            rows = shape[0]
            factors = (rows + numel // rows) * rank
            compressed = len(shape) > 1 and factors * MIN_COMPRESSION < numel
            total += factors if compressed else numel
        return dense_allreduce(4 * total, size).sent

    # It starts collectives when others end, on threads of gloo. With several buckets the ranks may
    # start them in different orders, which ends in gloo's `EnforceNotMet`.
    return Hook(register, bytes_sent, has_warmup=True, one_bucket=True)


HOOKS: dict[str, Hook] = {
    "ddp_dense": Hook(_no_hook, dense_bytes(4)),
    "ddp_fp16": Hook(without_state(default_hooks.fp16_compress_hook), dense_bytes(2)),
    "ddp_powersgd_r1": _powersgd(1),
    "ddp_powersgd_r2": _powersgd(2),
    "ddp_powersgd_r4": _powersgd(4),
}


class HookBaseline(Baseline):
    """DDP with one of the hooks."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, options: BaselineOptions, hook: Hook
    ) -> None:
        super().__init__(model, options)
        self._hook = hook
        self._warmup = max(FIRST_POWERSGD_STEP, options.warmup_steps) if hook.has_warmup else 0
        self._dense = dense_bytes(4)
        self.optimizer = optimizer
        buckets: dict[str, Any] = {"bucket_cap_mb": ONE_BUCKET} if hook.one_bucket else {}
        self.module = DistributedDataParallel(model, **options.ddp_arguments | buckets)
        hook.register(self.module, options.warmup_steps)
        self._wait = BackwardWait(model)

    def after_backward(self) -> None:
        self._wait.measure()

    @property
    def waits(self) -> dict[str, float]:
        return {"backward": self._wait.seconds}

    @property
    def settings(self) -> dict[str, Any]:
        return {"warmup_steps": self._warmup} if self._hook.has_warmup else {}

    def bytes_sent(self, step: int) -> int:
        of_step = self._dense if step < self._warmup else self._hook.bytes_sent
        return of_step(self.shapes, self.options.world_size)
