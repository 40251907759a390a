"""What the bench compares: plain DDP, PyTorch's communication hooks, and every method of ours."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks as debugging_hooks
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as default_hooks
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as powersgd
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.ddp.attach import attach
from oktopk.adapters.ddp.handle import Handle
from oktopk.bench.shapes import Shapes
from oktopk.comm.ledger import dense_allreduce
from oktopk.methods import METHODS
from oktopk.wire.codec import CodecName

NOOP, DENSE = "noop", "ddp_dense"
ONE_BUCKET = 2**20  # MB
MIN_COMPRESSION = 2  # PowerSGD's own default: it compresses what becomes at least this much smaller


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The settings that every method of ours is measured with."""

    density: float
    wire: CodecName


Attach = Callable[[DistributedDataParallel, BenchSettings], Handle | None]
"""Attaches an exchange to a model; returns a handle if it is one of ours."""
BytesSent = Callable[[Shapes, int], int]
"""Returns the bytes that a rank sends in a step, from the tensors' shapes and the world size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCase:
    """One gradient exchange that is measured: a row of the table for each network."""

    attach: Attach
    bytes_sent: BytesSent
    """By its algorithm. Methods of ours have a ledger, which counts instead."""

    bucket_mb: float | None = None
    """The size of DDP's buckets; None is DDP's default."""

    settling_steps: int = 2
    """Steps before it runs at its usual speed. DDP rebuilds its buckets after the first."""


def _no_bytes(_: Shapes, __: int) -> int:
    return 0


def _dense_bytes(itemsize: int) -> BytesSent:
    def bytes_sent(shapes: Shapes, size: int) -> int:
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        return dense_allreduce(itemsize * numel, size).sent

    return bytes_sent


def _without_hook(_: DistributedDataParallel, __: BenchSettings) -> None:
    """Leave DDP as it is."""


def _with_hook(hook: Callable[[Any, Any], Future[Tensor]]) -> Attach:
    """Register a communication hook of PyTorch that has no state."""

    def attach_hook(model: DistributedDataParallel, _: BenchSettings) -> None:
        model.register_comm_hook(None, hook)

    return attach_hook


def _powersgd(rank: int) -> BenchCase:
    def attach_hook(model: DistributedDataParallel, _: BenchSettings) -> None:
        logging.getLogger(powersgd.__name__).setLevel(logging.WARNING)
        state = powersgd.PowerSGDState(None, rank, start_powerSGD_iter=2)
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

    return BenchCase(
        attach=attach_hook, bytes_sent=bytes_sent, bucket_mb=ONE_BUCKET, settling_steps=4
    )


def _method(name: str) -> BenchCase:
    def attach_method(model: DistributedDataParallel, settings: BenchSettings) -> Handle:
        return attach(
            model,
            method=name,
            warmup_steps=0,
            check_every=0,
            density=settings.density,
            wire=settings.wire,
        )

    return BenchCase(attach=attach_method, bytes_sent=_dense_bytes(4), settling_steps=6)


BASELINES: dict[str, BenchCase] = {
    NOOP: BenchCase(attach=_with_hook(debugging_hooks.noop_hook), bytes_sent=_no_bytes),
    DENSE: BenchCase(attach=_without_hook, bytes_sent=_dense_bytes(4)),
    "ddp_fp16": BenchCase(
        attach=_with_hook(default_hooks.fp16_compress_hook), bytes_sent=_dense_bytes(2)
    ),
    "ddp_powersgd_r1": _powersgd(1),
    "ddp_powersgd_r4": _powersgd(4),
}
CASES: dict[str, BenchCase] = BASELINES | {name: _method(name) for name in METHODS}
