"""`attach`: two lines for a `DistributedDataParallel` model.

DDP calls the hook for every bucket while backward continues. The hook puts the bucket on a queue
and returns a future; one thread per model exchanges the buckets in order, on a process group of its
own. So the collectives of a rank leave from one thread in one order, and backward waits only at its
end, as with plain DDP.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from oktopk.adapters.ddp.communication_thread import ReadyBucket
from oktopk.adapters.ddp.driver import DriverOptions, OnStep, StepDriver
from oktopk.adapters.ddp.handle import Handle
from oktopk.adapters.ddp.hook import HookState, attached_to
from oktopk.adapters.ddp.validation import (
    check_model,
    check_size,
    clip_norm,
    is_on_cuda,
    may_overlap,
    time_limit,
)
from oktopk.adapters.parameters import ParameterLayout
from oktopk.adapters.policy import Policy
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import PROTOCOL, agree_at
from oktopk.comm.failure_detector import RollCall, patience_of, present
from oktopk.comm.process_groups import own_transport
from oktopk.comm.torch_transport import TorchTransport
from oktopk.methods import METHODS
from oktopk.methods.cost_model import Work, entry_bits
from oktopk.methods.prediction import cheapest, probe_kernels, probe_link
from oktopk.optim.presets import apply_preset, schedule_after_warmup, warn_if_short
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.settings import OnNonfinite, Scope, Settings, num_kept
from oktopk.utils.arguments import choice, integer, shown
from oktopk.version import __version__
from oktopk.wire.codec import Form

log = logging.getLogger("oktopk")


def attach(
    model: DistributedDataParallel,
    *,
    method: str = "oktopk",
    density: float = 0.02,
    warmup_steps: int = 128,
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
    wire: Form = "bf16",
    group_numel: int = 2**25,
    exact_every: int = 32,
    bounds_every: int = 64,
    on_nonfinite: OnNonfinite | None = None,
    on_step: OnStep | None = None,
    check_every: int = 100,
    timeout: float = 300.0,
    total_steps: int | None = None,
    comm: Comm | None = None,
) -> Handle:
    """Compress the gradient exchange of a DDP model. Every rank must call it, before training.

    Args:
        method: a name of `oktopk.METHODS`, or `auto`: dense, topka or oktopk, whichever is fastest
            by a short measurement of the network and the kernels now. The choice is logged.
        density: fraction of the entries that is kept, in (0, 1].
        warmup_steps: dense steps before the sparse phase.
        ramp_steps: steps after the warm-up in which the density falls from 25 %. By default twice
            the warm-up if there is an optimizer, else 0.
        schedule: (steps, density) pairs that follow the warm-up, instead of a ramp.
        optimizer: the optimizer or a scheduler of it. The preset of SGD, or of Adam and its kin, is
            used and logged (`oktopk.optim.presets`): SGD's residuals are rescaled with its learning
            rate, Adam's second moment is corrected for sums that arrive late. Rank 0 warns of any
            other optimizer: it gets plain error feedback, as does None.
        scaler: residuals are rescaled with its loss scale, and a NaN is delivered for it to see. A
            disabled scaler counts as none.
        overshoot: see `oktopk.Settings`. None: as the optimizer's preset says.
        staleness_correction: see `oktopk.Settings`. None: as the optimizer's preset says.
        rescale_with_lr: see `oktopk.Settings`. None: as the optimizer's preset says.
        max_beta1: see `oktopk.Settings`. None leaves Adam's first beta alone.
        clip_before: clip this rank's gradient, without the scaler's loss scale, to this norm before
            the exchange. The norm needs the last bucket, so nothing overlaps with backward. To
            clip after the exchange, call `clip_grad_norm_` as always.
        policy: which parameters travel dense; biases, norms and tiny ones by default.
        scope: select the k largest entries of the whole `model`, or of every `bucket`.
        wire: how entries travel: `plain`, `fp32`, `bf16`, `fp16` or `int8`.
        group_numel: entries of consecutive buckets that are exchanged together (`oktopk`).
        exact_every: steps between exact thresholds over the whole model (`oktopk`).
        bounds_every: steps between updates of the region bounds (`oktopk`).
        on_nonfinite: what all ranks do when one has a NaN or Inf: `skip` the step, `raise`, or
            `deliver` NaN. None: deliver with a scaler, else skip.
        on_step: called with the `StepStats` of every finished step, on the communication thread: it
            must not start collectives. An error in it is logged.
        check_every: steps between comparisons of the weights of all ranks; 0 is never.
        timeout: seconds a rank waits for the others before it raises. The last third of them, at
            most 5 s, is for finding out which rank is missing.
        total_steps: how long the run will be, to warn if it ends before the sparse phase.
        comm: exchange over this communicator instead of a new process group of the model's ranks.
    """
    check_model(model)
    timeout, clip_before = time_limit(timeout), clip_norm(clip_before)
    check_every = integer("check_every", check_every, least=0)
    choice("method", method, (*METHODS, "auto"))
    if total_steps is not None:
        total_steps = integer("total_steps", total_steps, least=1)
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy must be an oktopk.Policy, got {shown(policy)}")
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step must be a function of a StepStats, got {shown(on_step)}")
    _check_comm(comm, model)
    scaling = ResidualScaling(optimizer, scaler)
    if on_nonfinite is None:
        on_nonfinite = "deliver" if scaling.has_scaler else "skip"
    chosen = {
        "overshoot": overshoot,
        "staleness_correction": staleness_correction,
        "rescale_with_lr": rescale_with_lr,
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    settings = Settings(
        method="oktopk" if method == "auto" else method,
        density=density,
        warmup_steps=warmup_steps,
        schedule=() if schedule is None else schedule,
        max_beta1=max_beta1,
        scope=scope,
        wire=wire,
        group_numel=group_numel,
        exact_every=exact_every,
        bounds_every=bounds_every,
        on_nonfinite=on_nonfinite,
        **chosen,
    )
    is_first = dist.get_rank(model.process_group) == 0
    if schedule is None:
        after_warmup = schedule_after_warmup(settings, scaling.optimizer, ramp_steps)
        settings = replace(settings, schedule=after_warmup)
    settings = apply_preset(settings, scaling.optimizer, chosen, logs=is_first)
    if is_first and total_steps is not None and method != "dense":
        warn_if_short(settings, total_steps)
    check_size(model, settings)
    parameters = ParameterLayout(model, policy or Policy())
    facts = asdict(settings) | {
        "method": method,
        "clip_before": clip_before,
        "timeout": timeout,
        "check_every": check_every,
        "optimizer": type(scaling.optimizer).__name__,
        "scaler": scaler is not None,
        "comm": comm is not None,
    }
    agree = partial(_agree, model.process_group, timeout)
    place = agree(facts | _facts(model, parameters), "attach", "oktopk.attach")
    options = DriverOptions(
        clip_before=clip_before, check_every=check_every, overlaps=may_overlap(model)
    )

    def agree_to_load(facts: dict[str, Any], step: int) -> None:
        agree(facts, "load_state_dict", f"{place}.step-{step}")

    with ExitStack() as undo:  # nothing is left behind where one of these fails
        own, failure_detector = _connect(model, timeout, comm, undo)
        if method == "auto":
            settings = replace(settings, method=_fastest_method(model, settings, own))
        driver = StepDriver(settings, own, parameters, scaling, options, on_step)
        handle = Handle(
            driver,
            own,
            failure_detector,
            parameters,
            scaling,
            agree_to_load=agree_to_load,
            method_is_auto=method == "auto",
        )
        undo.callback(handle.close)
        _install(model, handle)
        undo.pop_all()
    return handle


def _check_comm(comm: Comm | None, model: DistributedDataParallel) -> None:
    if comm is None:
        return
    if not isinstance(comm, Comm):
        raise TypeError(f"comm must be an oktopk Comm, got {shown(comm)}")
    rank, size = dist.get_rank(model.process_group), dist.get_world_size(model.process_group)
    if (comm.rank, comm.size) != (rank, size):
        raise ValueError(
            f"comm has rank {comm.rank} of {comm.size}, and the model's process group has rank "
            f"{rank} of {size}: they must be the same"
        )


def _facts(model: DistributedDataParallel, layout: ParameterLayout) -> dict[str, Any]:
    """What must be the same on every rank besides the arguments: versions, group, parameters."""
    facts: dict[str, Any] = {
        "oktopk": __version__,
        "protocol": PROTOCOL,
        "world size": dist.get_world_size(model.process_group),
        "backend": dist.get_backend_config(model.process_group),
        "find_unused_parameters": model.find_unused_parameters,
        "static_graph": model.static_graph,
        "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
        "order of parameters": " ".join(layout.parameters),
    }
    for name, p in layout.parameters.items():
        travels = "dense" if layout.is_dense(name) else "sparse"
        facts[f"parameter {name!r}"] = f"{list(p.shape)} {p.dtype} {p.device.type} {travels}"
    return facts


def _agree(group: Any, timeout: float, facts: dict[str, Any], call: str, place: str) -> str:
    """Compare what all ranks are about to do, before any collective: ranks that differ abort."""
    transport = TorchTransport(group)
    return agree_at(transport.store, transport.rank, transport.size, timeout, facts, call, place)


def _fastest_method(model: DistributedDataParallel, settings: Settings, comm: Comm) -> str:
    """The method with the shortest exchange by measured network and kernels, the same on all ranks.

    One choice for the model: its groups are alike in size, or there is only one.
    """
    device = next(model.parameters()).device
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    link, speed = probe_link(comm, device), probe_kernels(comm, device)
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    bits = 96.0 if wide else entry_bits(settings.wire, settings.density)
    kept, value_bytes = num_kept(numel, settings.density), 8 if wide else 4
    times = cheapest(Work(numel, kept, comm.size, bits, value_bytes), link, speed)
    best = next(iter(times))
    if comm.rank == 0:
        predicted = ", ".join(f"{name} {1e3 * taken:.0f} ms" for name, taken in times.items())
        log.info(
            "auto: %s (predicted for an exchange: %s; latency %.2f ms, %.0f Mbit/s per rank)",
            best,
            predicted,
            1e3 * link.latency,
            8e-6 * link.bandwidth,
        )
    return best


def _connect(
    model: DistributedDataParallel, timeout: float, comm: Comm | None, undo: ExitStack
) -> tuple[Comm, RollCall]:
    """The communicator, over a new group of the model's ranks unless one is given, and the failure
    detector.

    With a group of its own, no collective of DDP's or the user's mixes with those of the exchange.
    For a model of only some ranks, the others need not take part; but torch then asks that its
    ranks have made the same groups before.
    """
    group = model.process_group
    ranks = dist.get_process_group_ranks(group)
    if comm is None:
        transport = own_transport(
            ranks,
            timeout,
            on_cuda=is_on_cuda(model),
            backend=dist.get_backend(group),
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        undo.callback(transport.close)
        comm = Comm(transport)
        store = transport.store
    else:
        store = TorchTransport(group).store
    if (of_job := present()) is not None and ranks == list(range(dist.get_world_size())):
        failure_detector = of_job.share()
    else:
        failure_detector = RollCall(store(), comm.rank, comm.size, patience_of(timeout))
    undo.callback(failure_detector.close)
    return comm, failure_detector


def _install(model: DistributedDataParallel, handle: Handle) -> None:
    """Register DDP's hook, or let the hook of a closed handle call this one."""
    state = attached_to(model)
    if state is not None:
        state.handle = handle
    else:
        model.register_comm_hook(HookState(model, handle), _hook)


def _hook(state: HookState, bucket):  # noqa: ANN001, ANN202 - DDP refuses annotations kept as text
    state.note_join()
    buffer, ready = bucket.buffer(), None
    if buffer.is_cuda:
        ready = torch.cuda.Event()
        ready.record()
    ready_bucket = ReadyBucket(bucket.index(), buffer, bucket.parameters(), bucket.is_last(), ready)
    return state.handle.thread.submit(ready_bucket)
