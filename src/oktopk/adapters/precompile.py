# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels before the first sparse exchange, so that it need not wait for them.

A thread of its own runs some tiny sparse steps with the settings of the run, on two simulated
ranks: that compiles exactly the kernels that the run will use, with their types. Nothing is sent,
no random numbers are drawn, and kernels give the same bits whenever they were compiled, so ranks
need not wait for each other. Numba has one lock for compiling: a sparse step that begins early
waits for the kernel that it needs, as it would have anyway.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.comm.simulated import run_ranks
from oktopk.engine.buckets import Bucket
from oktopk.engine.engine import Engine
from oktopk.settings import Settings

NUM_STEPS = 8  # exact thresholds, reused ones, quotas, new bounds
NUMEL = 2048  # enough that packed indices are smaller than plain ones

_threads: dict[tuple[object, ...], threading.Thread] = {}
"""By what decides which kernels are needed. A key is never removed: a process compiles once."""


def precompile(
    settings: Settings, parameters: Iterable[Tensor], steps_before: int | None = None
) -> None:
    """Start compiling what a run needs, if there are steps before its first sparse exchange.

    By default these are the warm-up. The gradients are taken to be like the first parameter. Only
    for CPUs: Triton's kernels are compiled for the sizes that they are launched with.
    """
    like = next(iter(parameters), None)
    if like is None or like.device.type != "cpu":
        return
    steps_before = settings.warmup_steps if steps_before is None else steps_before
    if settings.method == "dense" or steps_before == 0:
        return
    dtype = like.dtype
    key = (settings.method, settings.wire, settings.scope, settings.average, dtype)
    key += (settings.staleness_correction, settings.density == 1)
    if key in _threads:
        return
    # not a daemon: at the end of the process LLVM must not be in the middle of something
    _threads[key] = threading.Thread(
        target=_run_steps, args=(settings, dtype), name="compile-kernels", daemon=False
    )
    _threads[key].start()


def wait() -> None:
    """Return when everything that was started is compiled."""
    for thread in list(_threads.values()):
        if thread is not threading.current_thread():
            thread.join()


# a child that was forked while another thread holds numba's lock could never compile anything
os.register_at_fork(before=wait)


def _run_steps(settings: Settings, dtype: torch.dtype) -> None:
    tiny = replace(
        settings,
        warmup_steps=0,
        schedule=(),
        density=max(settings.density, 0.05),
        exact_every=3,
        bounds_every=2,
    )
    for group_numel in (NUMEL, 2**25):  # several groups of buckets, and all of them in one
        each = replace(tiny, group_numel=group_numel)
        run_ranks(2, partial(_run_rank, each, dtype))
    if settings.staleness_correction:
        _correct_moments()


def _run_rank(settings: Settings, dtype: torch.dtype, comm: Comm) -> None:
    sizes = Bucket(NUMEL, ((0, 64),)), Bucket(NUMEL), Bucket(NUMEL)
    engine = Engine(settings, comm, list(sizes))
    values = torch.arange(1.0, NUMEL + 1)
    for number in range(NUM_STEPS):
        grads = [torch.sin(values * (1 + comm.rank + number)).to(dtype) for _ in sizes]
        step = engine.begin(grads[0])
        for bucket, grad in enumerate(grads):
            step.add_bucket(bucket, grad)
        engine.finish(step)


def _correct_moments() -> None:
    grad, step = torch.ones(8), 9
    moment = kernels.SecondMoment(
        grad=grad,
        exp_avg_sq=torch.ones(8),
        last_arrival=torch.zeros(8, dtype=torch.int32),
        shares=torch.ones(16),
        beta2=0.99,
    )
    kernels.correct_second_moments_([moment], step)
