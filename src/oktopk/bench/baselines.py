# SPDX-License-Identifier: Apache-2.0
"""What the bench compares: plain DDP, PyTorch's communication hooks, every method of ours, and the
exchanges that happen only every few steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks as debugging_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from oktopk.adapters.ddp.attach import attach
from oktopk.adapters.ddp.handle import Handle
from oktopk.adapters.local_steps.handle import LocalSteps
from oktopk.adapters.local_steps.local_steps import local_steps
from oktopk.baselines.base import BaselineOptions
from oktopk.baselines.hooks import HOOKS, ONE_BUCKET, Hook, without_state
from oktopk.baselines.names import HOOK_NAMES
from oktopk.baselines.table import BASELINES
from oktopk.bench.shapes import Shapes
from oktopk.bench.stream import Stream
from oktopk.methods import METHODS
from oktopk.wire.codec import CodecName

NOOP, DENSE = "noop", "ddp_dense"
LOCAL_STEPS = "local_steps"


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The settings that every case is measured with."""

    density: float
    wire: CodecName
    world_size: int


@dataclass(frozen=True, slots=True)
class Started:
    """An exchange that is ready to be measured."""

    step: Callable[[], float]
    """Makes a gradient, exchanges it, and returns the seconds of that."""

    handle: Handle | LocalSteps | None
    """If it is one of ours; its ledger counts."""

    bytes_sent: int = 0
    """By the algorithm, for those without a handle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCase:
    """One exchange that is measured: a row of the table for each network."""

    start: Callable[[Stream, BenchSettings], Started]
    settling_steps: int = 2
    """Steps before it runs at its usual speed. DDP rebuilds its buckets after the first."""

    is_local: bool = False
    """Whether training has it only every few steps (`--every`)."""


def _no_bytes(_: Shapes, __: int) -> int:
    return 0


def _wrapped(stream: Stream, bucket_mb: float | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(
        stream,
        init_sync=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,  # type: ignore[arg-type] - None is DDP's default
    )


def _backward(model: DistributedDataParallel) -> float:
    """Take a step and return its seconds."""
    model.zero_grad(set_to_none=True)
    start = perf_counter()
    model().backward()
    return perf_counter() - start


def _optimizer_step(stream: Stream, optimizer: Optimizer) -> float:
    """Change the weights by the next gradient; the seconds of that and of its exchange."""
    stream.zero_grad(set_to_none=True)
    stream().backward()
    start = perf_counter()
    optimizer.step()
    return perf_counter() - start


def _hook(hook: Hook, *, settling_steps: int = 2) -> BenchCase:
    """Measure a communication hook of PyTorch, without dense steps at the start."""

    def start(stream: Stream, settings: BenchSettings) -> Started:
        model = _wrapped(stream, ONE_BUCKET if hook.one_bucket else None)
        hook.register(model, 0)
        sent = hook.bytes_sent(stream.shapes, settings.world_size)
        return Started(partial(_backward, model), None, sent)

    return BenchCase(start=start, settling_steps=settling_steps)


def _method(name: str) -> BenchCase:
    def start(stream: Stream, settings: BenchSettings) -> Started:
        model = _wrapped(stream)
        handle = attach(
            model,
            method=name,
            warmup_steps=0,
            check_every=0,
            verbose=False,
            density=settings.density,
            wire=settings.wire,
        )
        return Started(partial(_backward, model), handle)

    return BenchCase(start=start, settling_steps=6)


def _start_local_steps(stream: Stream, settings: BenchSettings) -> Started:
    """An exchange after every step, so that every step measures one."""
    optimizer = SGD(stream.parameters(), lr=1.0)
    handle = local_steps(
        stream,
        optimizer,
        every=1,
        check_every=0,
        density=settings.density,
        wire=settings.wire,
        verbose=False,
    )
    return Started(partial(_optimizer_step, stream, optimizer), handle)


def _baseline(name: str) -> BenchCase:
    def start(stream: Stream, settings: BenchSettings) -> Started:
        options = BaselineOptions(
            world_size=settings.world_size,
            warmup_steps=0,
            every=1,
            density=settings.density,
            ddp_arguments={},
        )
        made = BASELINES[name](stream, SGD(stream.parameters(), lr=1.0), options)
        step = partial(_optimizer_step, stream, made.optimizer)
        return Started(step, None, made.bytes_sent(0))

    return BenchCase(start=start, is_local=True)


NOOP_HOOK = Hook(without_state(debugging_hooks.noop_hook), _no_bytes)
POWERSGD = [name for name in HOOK_NAMES if "powersgd" in name]
CASES: dict[str, BenchCase] = {
    NOOP: _hook(NOOP_HOOK),
    DENSE: _hook(HOOKS[DENSE]),
    "ddp_fp16": _hook(HOOKS["ddp_fp16"]),
    **{name: _hook(HOOKS[name], settling_steps=4) for name in POWERSGD},
    **{name: _method(name) for name in METHODS},
    **{name: _baseline(name) for name in ("diloco", "sparseloco")},
    LOCAL_STEPS: BenchCase(start=_start_local_steps, settling_steps=6, is_local=True),
}
