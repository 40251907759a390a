"""Who takes part: DDP as it is, the hooks people would use instead, and every method of ours."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks as debugging_hooks
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as default_hooks
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.ddp.attach import attach
from oktopk.adapters.ddp.handle import Handle
from oktopk.comm.ledger import dense_allreduce
from oktopk.methods import METHODS

FLOOR, DENSE = "noop", "ddp_dense"
ONE_BUCKET = 2**20  # MB


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One row of the bench."""

    hook: Callable[[DistributedDataParallel, dict[str, Any]], Handle | None]
    """Registers it on a model; a handle where it is one of ours."""

    sent: Callable[[list[tuple[int, ...]], int], int]
    """Bytes a rank sends a step by its algorithm, where no ledger tells: (shapes, ranks)."""

    bucket_mb: float | None = None
    """None: as DDP does it."""

    settles: int = 2
    """Steps before it runs as it will: DDP builds its buckets anew after the first."""


def _peer(hook: Callable[..., Any], state: Callable[[], Any] = lambda: None) -> Callable[..., None]:
    def register(model: DistributedDataParallel, _: dict[str, Any]) -> None:
        model.register_comm_hook(state(), hook)

    return register


def _ours(method: str) -> Callable[..., Handle]:
    def register(model: DistributedDataParallel, settings: dict[str, Any]) -> Handle:
        return attach(model, method=method, warmup_steps=0, check_every=0, **settings)

    return register


def _powersgd(rank: int) -> Contender:
    def state() -> powersgd.PowerSGDState:
        logging.getLogger(powersgd.__name__).setLevel(logging.WARNING)
        return powersgd.PowerSGDState(None, rank, start_powerSGD_iter=2)

    def sent(shapes: list[tuple[int, ...]], size: int) -> int:
        """Two thin matrices for every one that they are smaller than, and the rest whole."""
        total = 0
        for shape in shapes:
            numel = torch.Size(shape).numel()
            rows = shape[0]
            thin = (rows + numel // rows) * rank
            total += thin if len(shape) > 1 and thin * MIN_RATE < numel else numel
        return dense_allreduce(4 * total, size).sent

    return Contender(
        hook=_peer(powersgd.powerSGD_hook, state), sent=sent, bucket_mb=ONE_BUCKET, settles=4
    )


MIN_RATE = 2  # PowerSGD's own default: compress what becomes at least this much smaller


def _dense_bytes(itemsize: int) -> Callable[[list[tuple[int, ...]], int], int]:
    def sent(shapes: list[tuple[int, ...]], size: int) -> int:
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        return dense_allreduce(itemsize * numel, size).sent

    return sent


CONTENDERS: dict[str, Contender] = {
    FLOOR: Contender(hook=_peer(debugging_hooks.noop_hook), sent=lambda *_: 0),
    DENSE: Contender(hook=lambda *_: None, sent=_dense_bytes(4)),
    "ddp_fp16": Contender(hook=_peer(default_hooks.fp16_compress_hook), sent=_dense_bytes(2)),
    "ddp_powersgd_r1": _powersgd(1),
    "ddp_powersgd_r4": _powersgd(4),
    **{name: Contender(hook=_ours(name), sent=_dense_bytes(4), settles=6) for name in METHODS},
}
