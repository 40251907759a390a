# SPDX-License-Identifier: Apache-2.0
"""`attach`: two lines for a `DistributedDataParallel` model."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, TypedDict

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from oktopk.adapters.announcement import tell
from oktopk.adapters.budget import AUTO, BudgetOptions, budget_options, start_budget
from oktopk.adapters.buffers import StepBuffers
from oktopk.adapters.ddp_driver import DDPParameterLayout, DriverOptions, StepDriver
from oktopk.adapters.ddp_handle import Handle, HookState, attached_to
from oktopk.adapters.ddp_validation import check_model, check_size, clip_norm, may_overlap
from oktopk.adapters.driver import OnStep
from oktopk.adapters.handle import Connection, note_open, refuse_other_exchange
from oktopk.adapters.link import (
    agree_by_store,
    compile_kernels,
    connect,
    describe_model,
    fastest_method,
)
from oktopk.adapters.node import HierarchicalDriver, SliceLayout, check_hierarchy, connect_nodes
from oktopk.adapters.parameters import Policy, check_types, is_on_cuda, time_limit
from oktopk.adapters.thread import ReadyBucket
from oktopk.comm.communicator import Comm
from oktopk.comm.failure import FailureDetector
from oktopk.methods import METHODS
from oktopk.methods.base import SHORT_BYTES
from oktopk.optim.presets import Choices, choices_of, default_warmup, suited
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.settings import (
    DEFAULT_GROUP_NUMEL,
    DENSITY,
    WIRE,
    GroupNumel,
    OnNonfinite,
    Scope,
    Settings,
)
from oktopk.utils.arguments import choice, chosen, flag, integer
from oktopk.wire import CodecName

# `attach`: two lines for a `DistributedDataParallel` model.
#
# DDP calls the hook for every bucket while backward continues. The hook puts the bucket on a queue
# and returns a future; one thread per model exchanges the buckets in order, on a process group of
# its own. So the collectives of a rank leave from one thread in one order, and backward waits only
# at its end, as with plain DDP.


FIRST_DENSITY = 0.02
"""Where the ramp ends with density `auto`, which may become as low."""


def attach(
    model: DistributedDataParallel,
    *,
    method: str = "oktopk",
    density: float | Literal["auto"] = DENSITY,
    exchange_share: float = 0.2,
    warmup_steps: int | None = None,
    ramp_steps: int | None = None,
    schedule: tuple[tuple[int, float], ...] | None = None,
    optimizer: Optimizer | LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    overshoot: float | None = None,
    staleness_correction: bool | None = None,
    rescale_with_lr: bool | None = None,
    max_beta1: float | None = None,
    clip_before: float | None = None,
    policy: Policy | None = None,
    scope: Scope = "model",
    wire: CodecName | None = None,
    group_numel: GroupNumel = DEFAULT_GROUP_NUMEL,
    exact_every: int = 32,
    bounds_every: int = 64,
    short_bytes: int = SHORT_BYTES,
    on_nonfinite: OnNonfinite | None = None,
    on_step: OnStep | None = None,
    check_every: int = 100,
    timeout: float | None = None,
    total_steps: int | None = None,
    verbose: bool = True,
    comm: Comm | None = None,
    local_group: dist.ProcessGroup | Literal["node"] | None = None,
) -> Handle:
    """Exchange the gradients of a DDP model sparsely. Every rank must call it, before training.

        model = DistributedDataParallel(net)
        handle = oktopk.attach(model, optimizer=optimizer, total_steps=num_steps)

    From then on `backward()` averages the largest entries of the gradient over all ranks, and each
    rank keeps the rest for later steps. The training loop does not change.

    Args:
        model: a `DistributedDataParallel` model that has no communication hook yet.
        method: a name of `oktopk.METHODS`, or `auto`: dense, topka or oktopk, whichever is fastest
            by a short measurement of the network and the kernels now. The choice is logged.
        density: fraction of the entries that is kept, in (0, 1]; or `auto`: the highest whose
            exchange stays under `exchange_share` on the network as measured in this run. It is
            revised as the network changes, the same on all ranks, and rank 0 announces a change.
        exchange_share: with density `auto`, the share of a step that waiting for the exchange may
            take.
        warmup_steps: dense steps before the sparse phase. By default 128, but at most 5 % of
            `total_steps`; half of that if the density is 20 % or more.
        ramp_steps: steps after the warm-up in which the density falls from 25 %. By default half of
            `total_steps` after the warm-up, at most 1024; without `total_steps` twice the warm-up;
            0 without an optimizer.
        schedule: (steps, density) pairs that follow the warm-up, instead of a ramp.
        optimizer: the optimizer or a scheduler of it. The preset of SGD, or of Adam and optimizers
            with its `betas`, is used and announced (`oktopk.optim.presets`): SGD's residuals are
            rescaled with its learning rate, Adam's second moment is corrected for sums that arrive
            late. Rank 0 warns of any other optimizer: it gets plain error feedback, as does None.
            An optimizer that is made later can be given to `Handle.bind`.
        scaler: residuals are rescaled with its loss scale, and a NaN is delivered for it to see. A
            disabled scaler counts as none.
        overshoot: how much more of every sum is delivered than was accumulated, and taken off the
            residual again. None: as the optimizer's preset says.
        staleness_correction: whether Adam's second moment takes a sum that arrives late as several
            small gradients, not as a large one. None: as the optimizer's preset says.
        rescale_with_lr: whether the residual is rescaled when the learning rate changes. None: as
            the optimizer's preset says.
        max_beta1: an upper limit for Adam's first beta in the sparse phase. None leaves it alone.
        clip_before: clip this rank's gradient, without the scaler's loss scale, to this norm before
            the exchange. The norm needs the last bucket, so nothing overlaps with backward. To
            clip after the exchange, call `clip_grad_norm_` as always.
        policy: which parameters travel dense; biases, norms and tiny ones by default.
        scope: select the k largest entries of the whole `model`, or of every `bucket`.
        wire: how entries travel: `plain`, `fp32`, `bf16`, `fp16`, `int8`, `int4`, `int2` or
            `sign`; the fewer bits, the more rounding stays in the residual. None: `int4`; with
            density `auto` the fastest of `plain`, `bf16` and `int4`.
        group_numel: entries of consecutive buckets that are exchanged together (`oktopk`), or
            `auto`: as measured in the first sparse steps. The choice is logged and saved.
        exact_every: steps between exact thresholds over the whole model (`oktopk`).
        bounds_every: steps between updates of the region bounds (`oktopk`).
        short_bytes: bytes that a rank may send in a short exchange of two rounds (`oktopk`).
        on_nonfinite: what all ranks do when one has a NaN or Inf: `skip` the step, `raise`, or
            `deliver` NaN. None: deliver with a scaler, else skip.
        on_step: called with the `StepStats` of every finished step, on the communication thread: it
            must not start collectives. An error in it is logged.
        check_every: steps between comparisons of the weights of all ranks; 0 is never.
        timeout: seconds a rank waits for the others before it raises; None: the timeout of the
            process group. The last third of them, at most 5 s, is for finding out which rank is
            missing.
        total_steps: how many steps the run will have. It limits the default warm-up, and rank 0
            warns if the run ends before it is sparse.
        verbose: rank 0 announces what will happen in one line, and the begin of the sparse phase in
            another: in the log at INFO, or on stderr if nobody has configured logging.
        comm: an `oktopk.Comm` to exchange over, instead of a new process group of the model's
            ranks. It stays open when the handle is closed, but a failed exchange closes it. It has
            the time limit of its own transport, and can serve one attached model at a time.
        local_group: the ranks of this node, as a process group, or `node` for those on the same
            machine. Gradients are then reduced densely inside a node, and each of its ranks
            exchanges an equal slice of them with the other nodes. Statistics and residuals are
            those of the slice.

    Returns:
        The handle: statistics of the last step, the state that a resume needs, and `close()`.

    Raises:
        TypeError: an argument has the wrong type, or the model is not a `DistributedDataParallel`.
        ValueError: an argument, the model or the process group cannot be used, or the ranks were
            called with different arguments. The message says what to do.
        ExchangeError: a rank did not take part within `timeout`; the message names it.
    """
    check_model(model, chosen(attach, locals()))
    check_types(policy=policy, on_step=on_step, comm=comm)
    _check_ranks(model, comm)
    refuse_other_exchange(model.parameters(), _ranks_of(model), "gradients")
    timeout = time_limit(timeout, model.process_group)
    choice("method", method, (*METHODS, "auto"))
    if local_group is not None:
        check_hierarchy(local_group, model, comm, method)
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
    budget = budget_options(density, wire, exchange_share, method)
    if budget is not None and local_group is not None:
        raise ValueError("density='auto' does not work with local_group: give a density")
    settings = Settings(
        method="oktopk" if method == "auto" else method,
        density=FIRST_DENSITY if budget else density,  # pyright: ignore[reportArgumentType] - checked
        warmup_steps=default_warmup(warmup_steps, total_steps, density),
        schedule=() if schedule is None else schedule,
        max_beta1=max_beta1,
        scope=scope,
        wire=WIRE if wire is None else wire,
        group_numel=group_numel,
        exact_every=exact_every,
        bounds_every=bounds_every,
        short_bytes=short_bytes,
        on_nonfinite=on_nonfinite,
        **choices.fields,
    )
    settings = suited(settings, scaling.optimizer, choices)
    check_size(model, settings)
    options = DriverOptions(
        clip_before=clip_norm(clip_before),
        check_every=integer("check_every", check_every, least=0),
        overlaps=may_overlap(model),
        verbose=flag("verbose", verbose),
    )
    policy = policy or Policy()
    parameters = DDPParameterLayout(model, policy)
    job = _Job(model, parameters, scaling, timeout, method, policy, local_group, choices, budget)
    is_first = dist.get_rank(model.process_group) == 0
    compile_kernels(parameters.parameters.values(), tell=is_first and options.verbose)
    handle = _start(job, settings, options, on_step, comm)
    if is_first:
        tell(handle.driver, total_steps, verbose=verbose)
    return handle


@dataclass(frozen=True, slots=True)
class _Job:
    """What `attach` was called with, apart from the settings."""

    model: DistributedDataParallel
    parameters: DDPParameterLayout
    scaling: ResidualScaling
    timeout: float
    method: str
    """As asked: it may be `auto`."""

    policy: Policy
    local_group: dist.ProcessGroup | Literal["node"] | None
    choices: Choices
    auto: BudgetOptions | None
    """Of density `auto`, else None."""


def _start(
    job: _Job,
    settings: Settings,
    options: DriverOptions,
    on_step: OnStep | None,
    comm: Comm | None,
) -> Handle:
    """Compare with the other ranks, connect, and register the hook."""
    agree = partial(agree_by_store, job.model.process_group, job.timeout)
    arguments = asdict(settings) | {
        "method": job.method,
        "clip_before": options.clip_before,
        "check_every": options.check_every,
        "timeout": job.timeout,
        "optimizer": type(job.scaling.optimizer).__name__,
        "scaler": job.scaling.has_scaler,
        "comm": comm is not None,
        "local_group": job.local_group is not None,
    }
    arguments |= {"density": AUTO, **asdict(job.auto)} if job.auto else {}
    prefix = agree(arguments | describe_model(job.model, job.parameters), "attach", "oktopk.attach")

    def agree_to_load(values: dict[str, Any], step: int) -> None:
        agree(values, "load_state_dict", f"{prefix}.step-{step}")

    with ExitStack() as undo:  # nothing is left behind where one of these fails
        driver, failure_detector, everyone = _driver(job, settings, options, on_step, comm, undo)
        driver.buffers = StepBuffers(job.model)
        own = driver.comm
        connection = Connection(
            failure_detector=failure_detector,
            agree_to_load=agree_to_load,
            owns_comm=comm is None,
            everyone=everyone,
        )
        is_auto = job.method == "auto"
        handle = Handle(driver, connection, job.choices, method_is_auto=is_auto)
        own.is_attached = True
        undo.callback(handle.close)
        _install(job.model, handle)
        note_open(handle, job.parameters.parameters.values(), _ranks_of(job.model))
        undo.pop_all()
    return handle


def _driver(
    job: _Job,
    settings: Settings,
    options: DriverOptions,
    on_step: OnStep | None,
    comm: Comm | None,
    undo: ExitStack,
) -> tuple[StepDriver, FailureDetector, Comm | None]:
    """Connect; return what runs the steps, and the communicator of all ranks if it has another."""
    if job.local_group is not None:
        axes = connect_nodes(job.local_group, job.timeout, undo, job.parameters.device)
        layout = SliceLayout(job.model, job.policy, axes.shards.rank, axes.shards.size)
        driver = HierarchicalDriver(settings, axes, layout, job.scaling, options, on_step)
        return driver, axes.failure_detector, axes.everyone
    group, on_cuda = job.model.process_group, is_on_cuda(job.model)
    own, failure_detector = connect(group, job.timeout, comm, undo, on_cuda=on_cuda)
    if job.method == "auto":
        settings = replace(settings, method=fastest_method(job.model, settings, own))
    trained = list(job.parameters.parameters.values())
    budget = start_budget(job.auto, settings, trained, own, verbose=options.verbose)
    driver = StepDriver(settings, own, job.parameters, job.scaling, options, on_step, budget)
    return driver, failure_detector, None


def _ranks_of(model: DistributedDataParallel) -> list[int]:
    """The ranks of the job that have this model."""
    return dist.get_process_group_ranks(model.process_group)


def _check_ranks(model: DistributedDataParallel, comm: Comm | None) -> None:
    rank, size = dist.get_rank(model.process_group), dist.get_world_size(model.process_group)
    if comm is not None and (comm.rank, comm.size) != (rank, size):
        raise ValueError(
            f"comm has rank {comm.rank} of {comm.size}, and the model's process group has rank "
            f"{rank} of {size}: they must be the same"
        )


def _install(model: DistributedDataParallel, handle: Handle) -> None:
    """Register DDP's hook, or let the hook of a closed handle call this one."""
    state = attached_to(model)
    if state is not None:
        state.handle = handle
    else:
        model.register_comm_hook(HookState(model, handle), oktopk_hook)


def oktopk_hook(state: HookState, bucket):  # noqa: ANN001, ANN201 - DDP refuses text as annotation
    """DDP's communication hook. DDP logs this name."""
    state.note_join()
    buffer, ready = bucket.buffer(), None
    if buffer.is_cuda:
        ready = torch.cuda.Event()
        ready.record()
    ready_bucket = ReadyBucket(bucket.index(), buffer, bucket.parameters(), bucket.is_last(), ready)
    return state.handle.thread.submit(ready_bucket)


# `AttachOptions`: the options of `attach`, for functions that pass them on.


class AttachOptions(TypedDict, total=False):
    """The keywords of `attach`, which documents them, apart from the optimizer and the scaler."""

    method: str
    density: float | Literal["auto"]
    exchange_share: float
    warmup_steps: int | None
    ramp_steps: int | None
    schedule: tuple[tuple[int, float], ...] | None
    overshoot: float | None
    staleness_correction: bool | None
    rescale_with_lr: bool | None
    max_beta1: float | None
    clip_before: float | None
    policy: Policy | None
    scope: Scope
    wire: CodecName | None
    group_numel: GroupNumel
    exact_every: int
    bounds_every: int
    short_bytes: int
    on_nonfinite: OnNonfinite | None
    on_step: OnStep | None
    check_every: int
    timeout: float | None
    total_steps: int | None
    verbose: bool
    comm: Comm | None
    local_group: ProcessGroup | Literal["node"] | None
