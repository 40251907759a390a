# SPDX-License-Identifier: Apache-2.0
"""`attach_fsdp`: a model that FSDP2 shards inside a site, and that several sites train together."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from oktopk.adapters.announcement import tell
from oktopk.adapters.buffers import StepBuffers
from oktopk.adapters.driver import OnStep
from oktopk.adapters.fsdp_driver import (
    ShardDriver,
    ShardLayout,
    as_group,
    check_grid,
    check_model,
    check_modules,
    refuse_auto,
    reshard,
    shard_ranks,
    sharded_modules,
)
from oktopk.adapters.fsdp_handle import FSDPHandle
from oktopk.adapters.handle import Connection, note_open, refuse_other_exchange
from oktopk.adapters.link import (
    agree_by_store,
    compile_kernels,
    connect_axes,
    describe_group,
    describe_parameters,
)
from oktopk.adapters.parameters import Policy, check_optimizer, check_types, time_limit
from oktopk.exchange.layout import MAX_INDEXABLE, check_indexable, shard_group
from oktopk.optim.presets import choices_of, default_warmup, suited
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.settings import DENSITY, WIRE, OnNonfinite, Settings
from oktopk.utils.arguments import flag, integer
from oktopk.wire import CodecName


def attach_fsdp(
    model: nn.Module,
    replicate_group: dist.ProcessGroup | DeviceMesh,
    *,
    method: str = "oktopk",
    density: float = DENSITY,
    warmup_steps: int | None = None,
    ramp_steps: int | None = None,
    schedule: tuple[tuple[int, float], ...] | None = None,
    optimizer: Optimizer | LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    overshoot: float | None = None,
    staleness_correction: bool | None = None,
    rescale_with_lr: bool | None = None,
    max_beta1: float | None = None,
    policy: Policy | None = None,
    wire: CodecName = WIRE,
    exact_every: int = 32,
    bounds_every: int = 64,
    on_nonfinite: OnNonfinite | None = None,
    on_step: OnStep | None = None,
    check_every: int = 100,
    timeout: float | None = None,
    total_steps: int | None = None,
    verbose: bool = True,
) -> FSDPHandle:
    """Exchange gradients sparsely between replicas of a model that FSDP2 shards.

        mesh = init_device_mesh("cuda", (sites, 8), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        handle = oktopk.attach_fsdp(model, mesh["replicate"], optimizer=optimizer)

    Every rank of the job must call it, after `fully_shard` and before training. Gradients are
    averaged over replicas at the end of every backward that reduces them, so clipping and the
    optimizer see what they see with torch's own HSDP. All replicas must start from the same
    weights.

    Args:
        model: what `fully_shard` was called with, on a mesh of one dimension: the ranks of a site.
        replicate_group: the ranks that have the same shard of every replica, as a process group or
            a mesh of one dimension.
        method: a name of `oktopk.METHODS`.
        density: fraction of the entries of the whole model that is kept, in (0, 1].
        warmup_steps: dense steps before the sparse phase. By default 128, but at most 5 % of
            `total_steps`; half of that if the density is 20 % or more.
        ramp_steps: steps after the warm-up in which the density falls from 25 %. By default half of
            `total_steps` after the warm-up, at most 1024; without `total_steps` twice the warm-up;
            0 without an optimizer.
        schedule: (steps, density) pairs that follow the warm-up, instead of a ramp.
        optimizer: the optimizer or a scheduler of it; see `oktopk.attach`.
        scaler: residuals are rescaled with its loss scale, and a NaN is delivered for it to see. A
            disabled scaler counts as none.
        overshoot: how much more of every sum is delivered than was accumulated, and taken off the
            residual again. None: as the optimizer's preset says.
        staleness_correction: whether Adam's second moment takes a sum that arrives late as several
            small gradients, not as a large one. None: as the optimizer's preset says.
        rescale_with_lr: whether the residual is rescaled when the learning rate changes. None: as
            the optimizer's preset says.
        max_beta1: an upper limit for Adam's first beta in the sparse phase. None leaves it alone.
        policy: which parameters travel dense, by their whole shapes; biases, norms and tiny ones
            by default.
        wire: how entries travel: `plain`, `fp32`, `bf16`, `fp16`, `int8`, `int4`, `int2` or
            `sign`; the fewer bits, the more rounding stays in the residual.
        exact_every: steps between exact thresholds, and between divisions of k among the shards.
        bounds_every: steps between updates of the region bounds (`oktopk`).
        on_nonfinite: what all ranks of all replicas do when one has a NaN or Inf: `skip` the step,
            `raise`, or `deliver` NaN. None: deliver with a scaler, else skip.
        on_step: called with the `StepStats` of every finished step, of this rank's shard: it must
            not start collectives. An error in it is logged.
        check_every: steps between comparisons of the weights of all replicas, beside the first; 0
            is never.
        timeout: seconds a rank waits for the others before it raises; None: the timeout of the
            process group. The last third of them, at most 5 s, is for finding out which rank is
            missing.
        total_steps: how long the run will be. It limits the default warm-up, and rank 0 warns if
            the run ends before the sparse phase.
        verbose: rank 0 announces what will happen in one line, and the begin of the sparse phase in
            another.

    Returns:
        The handle: statistics of the last step, the state that a resume needs, and `close()`.

    Raises:
        TypeError: an argument has the wrong type, or the model is not sharded by `fully_shard`.
        ValueError: an argument, the model or the process group cannot be used, or the ranks were
            called with different arguments. The message says what to do.
        ExchangeError: a rank did not take part within `timeout`; the message names it.
    """
    check_types(policy=policy, on_step=on_step, comm=None)
    refuse_auto(method=method, density=density)
    scaling = ResidualScaling(optimizer, scaler)
    if on_nonfinite is None:
        on_nonfinite = "deliver" if scaling.has_scaler else "skip"
    if total_steps is not None:
        total_steps = integer("total_steps", total_steps, least=1)
    choices = choices_of(
        ramp_steps,
        schedule,
        total_steps,
        overshoot=overshoot,
        staleness_correction=staleness_correction,
        rescale_with_lr=rescale_with_lr,
    )
    settings = Settings(
        method=method,
        density=density,
        warmup_steps=default_warmup(warmup_steps, total_steps, density),
        schedule=() if schedule is None else schedule,
        max_beta1=max_beta1,
        wire=wire,
        group_numel=MAX_INDEXABLE,  # all at once: there is no backward left to hide behind
        exact_every=exact_every,
        bounds_every=bounds_every,
        on_nonfinite=on_nonfinite,
        **choices.fields,
    )
    settings = suited(settings, scaling.optimizer, choices)
    check_every = integer("check_every", check_every, least=0)
    verbose = flag("verbose", verbose)
    timeout = time_limit(timeout, dist.group.WORLD)
    job = _job(model, replicate_group, policy or Policy(), scaling, timeout)
    is_first = dist.get_rank() == 0
    compile_kernels(job.parameters.parameters.values(), tell=is_first and verbose)
    handle = _start(job, settings, check_every, on_step, verbose=verbose)
    handle.driver.buffers = StepBuffers(model)
    if is_first:
        tell(handle.driver, total_steps, verbose=verbose)
    return handle


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What `attach_fsdp` was called with, apart from the settings."""

    parameters: ShardLayout
    replicas: list[int]
    """Ranks of the job that have this rank's shard."""

    shards: list[int]
    """Ranks of the job that have the other shards of this replica."""

    scaling: ResidualScaling
    timeout: float


def _job(
    model: nn.Module, replicate_group: Any, policy: Policy, scaling: ResidualScaling, timeout: float
) -> _Job:
    group = as_group(replicate_group)
    check_model(model)
    if scaling.optimizer is not None:
        advice = "make it after fully_shard, which replaces the parameters"
        check_optimizer(scaling.optimizer, model.parameters(), advice)
    reshard(model)
    modules = sharded_modules(model)
    check_modules(modules)
    replicas = dist.get_process_group_ranks(group)
    shards = shard_ranks(modules[0])
    check_grid(replicas, shards)
    refuse_other_exchange(model.parameters(), replicas, "gradients")
    return _Job(
        parameters=ShardLayout(model, modules, policy),
        replicas=replicas,
        shards=shards,
        scaling=scaling,
        timeout=timeout,
    )


def _start(
    job: _Job, settings: Settings, check_every: int, on_step: OnStep | None, *, verbose: bool
) -> FSDPHandle:
    """Compare with the other ranks, connect both axes, and set FSDP's hooks."""
    if settings.method != "dense":
        check_indexable([module.numel for module in job.parameters.modules], settings.scope)
    agree = partial(agree_by_store, dist.group.WORLD, job.timeout)
    prefix = agree(_described(job, settings, check_every), "attach_fsdp", "oktopk.attach_fsdp")

    def agree_to_load(values: dict[str, Any], step: int) -> None:
        agree(values, "load_state_dict", f"{prefix}.step-{step}")

    with ExitStack() as undo:  # nothing is left behind where one of these fails
        device = job.parameters.device
        axes = connect_axes(job.shards[0], job.replicas[0], job.timeout, undo, device)
        shards = shard_group(axes.shards, job.parameters.num_sparse, device)
        driver = ShardDriver(
            settings,
            axes.replicas,
            job.parameters,
            job.scaling,
            check_every,
            on_step,
            shards,
            verbose=verbose,
        )
        connection = Connection(
            failure_detector=axes.failure_detector,
            agree_to_load=agree_to_load,
            owns_comm=True,
            everyone=axes.everyone,
        )
        handle = FSDPHandle(driver, connection)
        note_open(handle, job.parameters.parameters.values(), job.replicas)
        undo.pop_all()
    return handle


def _described(job: _Job, settings: Settings, check_every: int) -> dict[str, Any]:
    """What must be the same on every rank."""
    return asdict(settings) | {
        "check_every": check_every,
        "timeout": job.timeout,
        "optimizer": type(job.scaling.optimizer).__name__,
        "scaler": job.scaling.has_scaler,
        "replicas": len(job.replicas),
        "shards": len(job.shards),
        "FSDP modules": " ".join(module.name for module in job.parameters.modules),
        **describe_group(dist.group.WORLD),
        **describe_parameters(job.parameters),
    }
