# SPDX-License-Identifier: Apache-2.0
"""What the bench compares: plain DDP, PyTorch's communication hooks, and every method of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks as debugging_hooks
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.ddp.attach import attach
from oktopk.adapters.ddp.handle import Handle
from oktopk.baselines.hooks import (
    HOOKS,
    ONE_BUCKET,
    BytesSent,
    Hook,
    dense_bytes,
    without_state,
)
from oktopk.bench.shapes import Shapes
from oktopk.methods import METHODS
from oktopk.wire.codec import CodecName

NOOP, DENSE = "noop", "ddp_dense"


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The settings that every method of ours is measured with."""

    density: float
    wire: CodecName


Attach = Callable[[DistributedDataParallel, BenchSettings], Handle | None]
"""Attaches an exchange to a model; returns a handle if it is one of ours."""


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


def _hook(hook: Hook, *, settling_steps: int = 2) -> BenchCase:
    """Measure a communication hook of PyTorch, without dense steps at the start."""

    def attach_hook(model: DistributedDataParallel, _: BenchSettings) -> None:
        hook.register(model, 0)

    return BenchCase(
        attach=attach_hook,
        bytes_sent=hook.bytes_sent,
        bucket_mb=ONE_BUCKET if hook.one_bucket else None,
        settling_steps=settling_steps,
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

    return BenchCase(attach=attach_method, bytes_sent=dense_bytes(4), settling_steps=6)


NOOP_HOOK = Hook(without_state(debugging_hooks.noop_hook), _no_bytes)
CASES: dict[str, BenchCase] = {
    NOOP: _hook(NOOP_HOOK),
    DENSE: _hook(HOOKS[DENSE]),
    "ddp_fp16": _hook(HOOKS["ddp_fp16"]),
    **{
        name: _hook(HOOKS[name], settling_steps=4)
        for name in ("ddp_powersgd_r1", "ddp_powersgd_r4")
    },
    **{name: _method(name) for name in METHODS},
}
