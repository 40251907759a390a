# SPDX-License-Identifier: Apache-2.0
"""Plain DDP, and DDP with the communication hooks that come with PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as default_hooks
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as powersgd
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.baselines.base import BackwardWait, Baseline, BaselineOptions, Shapes
from oktopk.comm.ledger import dense_allreduce

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
