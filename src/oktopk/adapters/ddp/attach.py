"""`attach`: two lines for a `DistributedDataParallel` model.

DDP calls the hook for every bucket while backward goes on. The hook puts the bucket on a queue and
returns a future; one thread per model exchanges the buckets in order, on a process group of its
own. So the collectives of a rank leave from one thread in one order, and backward waits only at its
end, as with plain DDP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from oktopk.adapters.ddp.communication_thread import Arrived
from oktopk.adapters.ddp.handle import Handle
from oktopk.adapters.ddp.hook import HookState, attached_to
from oktopk.adapters.ddp.validation import (
    is_on_cuda,
    may_overlap,
    norm_or_none,
    refuse_misuse,
    refuse_size,
    seconds,
)
from oktopk.adapters.parameters import Named
from oktopk.adapters.policy import Policy
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import PROTOCOL, agree_at
from oktopk.comm.failure_detector import RollCall, patience_of, present
from oktopk.comm.process_groups import own_transport
from oktopk.comm.torch_transport import TorchTransport
from oktopk.methods import METHODS
from oktopk.methods.cost_model import Work, entry_bits
from oktopk.methods.prediction import cheapest, probe_kernels, probe_link
from oktopk.optim.presets import suited, warn_if_short
from oktopk.optim.residual_scaling import Followed
from oktopk.settings import Settings, num_kept
from oktopk.stats import StepStats
from oktopk.utils.arguments import choice, integer, shown
from oktopk.version import __version__

log = logging.getLogger("oktopk")


def attach(
    model: DistributedDataParallel,
    *,
    method: str = "oktopk",
    density: float = 0.02,
    warmup_steps: int = 128,
    ramp_steps: int | None = None,
    policy: Policy | None = None,
    on_step: Callable[[StepStats], None] | None = None,
    optimizer: Optimizer | LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    clip_before: float | None = None,
    total_steps: int | None = None,
    timeout: float = 300.0,
    check_every: int = 100,
    **more: Any,
) -> Handle:
    """Compress the gradient exchange of a DDP model. Every rank must call it, before training.

    Args:
        method: a name of `oktopk.METHODS`, or `auto`: dense, topka or oktopk, whichever is fastest
            by a short measurement of the network and the kernels now; logged.
        density: fraction of the entries that is kept, in (0, 1].
        warmup_steps: dense steps before the sparse phase.
        ramp_steps: steps in which the density then falls from 25 %. Twice the warm-up when there is
            an optimizer, 0 when there is none.
        policy: which parameters travel dense; biases, norms and tiny ones by default.
        on_step: called with the `StepStats` of every finished step, on the exchange thread: no
            collectives in it. An error in it is logged.
        optimizer: or a scheduler of it. What suits SGD, or Adam and its kin, is set unless given in
            `more`, and logged (`oktopk.remedies`): SGD's residuals follow its learning rate, Adam's
            second moment is corrected for sums that come late. Rank 0 warns of any other optimizer:
            it gets plain error feedback, as does None.
        scaler: residuals follow its loss scale, and a NaN is delivered for it to see. One that is
            disabled counts as none.
        clip_before: clip this rank's gradient, without the scaler's loss scale, to this norm before
            the exchange. The norm needs the last bucket, so nothing overlaps with backward. To
            clip after the exchange, call `clip_grad_norm_` as always.
        total_steps: how long the run will be, to warn when it ends before the sparse phase.
        timeout: seconds a rank waits for the others before it raises. The last third of them, at
            most 5 s, is for finding out who is missing.
        check_every: steps between comparisons of the weights of all ranks; 0 is never.
        more: the other fields of `oktopk.settings.Settings`.
    """
    refuse_misuse(model)
    timeout, clip_before = seconds(timeout), norm_or_none(clip_before)
    check_every = integer("check_every", check_every, least=0)
    choice("method", method, (*METHODS, "auto"))
    if total_steps is not None:
        total_steps = integer("total_steps", total_steps, least=1)
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy must be an oktopk.Policy, got {shown(policy)}")
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step must be a function of a StepStats, got {shown(on_step)}")
    followed = Followed(optimizer, scaler)
    if followed.has_scaler:
        more.setdefault("on_nonfinite", "deliver")
    asked = "oktopk" if method == "auto" else method
    settings = Settings(method=asked, density=density, warmup_steps=warmup_steps, **more)
    first = dist.get_rank(model.process_group) == 0
    settings = suited(followed.optimizer, settings, ramp_steps, more, tells=first)
    if first and total_steps is not None and method != "dense":
        warn_if_short(settings, total_steps)
    refuse_size(model, settings)
    policy = policy or Policy()
    arguments = asdict(settings) | {
        "method": method,
        "clip_before": clip_before,
        "timeout": timeout,
        "check_every": check_every,
        "optimizer": type(followed.optimizer).__name__,
        "scaler": scaler is not None,
    }
    agree = partial(_agree, model.process_group, timeout)
    place = agree(arguments | _facts(model, policy), "attach", "oktopk.attach")
    handle = _started(model, settings, policy, followed, timeout, auto=method == "auto")
    handle.on_step, handle.clip_before, handle.check_every = on_step, clip_before, check_every
    handle.overlaps = may_overlap(model)

    def agree_to_load(facts: dict[str, Any], step: int) -> None:
        agree(facts, "load_state_dict", f"{place}.step-{step}")

    handle.agree_to_load = agree_to_load
    return handle


def _started(
    model: DistributedDataParallel,
    settings: Settings,
    policy: Policy,
    followed: Followed,
    timeout: float,
    *,
    auto: bool,
) -> Handle:
    """The handle with its group, threads and hook; none of them is left where a step fails."""
    with ExitStack() as undo:
        on_cuda = is_on_cuda(model)
        comm, roll_call = _own_group(model.process_group, timeout, undo, on_cuda=on_cuda)
        if auto:
            settings = replace(settings, method=_chosen(model, settings, comm))
        handle = Handle(model, settings, comm, roll_call, policy, followed)
        undo.callback(handle.close)
        handle.takes_any_method = auto
        _install(model, handle)
        undo.pop_all()
    return handle


def _facts(model: DistributedDataParallel, policy: Policy) -> dict[str, Any]:
    """What must be the same on every rank besides the arguments: versions, group, parameters."""
    named = Named(model, policy)
    facts: dict[str, Any] = {
        "oktopk": __version__,
        "protocol": PROTOCOL,
        "world size": dist.get_world_size(model.process_group),
        "backend": dist.get_backend_config(model.process_group),
        "find_unused_parameters": model.find_unused_parameters,
        "static_graph": model.static_graph,
        "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
        "order of parameters": " ".join(named.parameters),
    }
    for name, p in named.parameters.items():
        travels = "dense" if named.is_dense(name) else "sparse"
        facts[f"parameter {name!r}"] = f"{list(p.shape)} {p.dtype} {p.device.type} {travels}"
    return facts


def _agree(group: Any, timeout: float, facts: dict[str, Any], call: str, place: str) -> str:
    """Compare what all ranks are about to do, before any collective: ranks that differ abort."""
    transport = TorchTransport(group)
    return agree_at(transport.store, transport.rank, transport.size, timeout, facts, call, place)


def _chosen(model: DistributedDataParallel, settings: Settings, comm: Comm) -> str:
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


def _own_group(
    group: Any, timeout: float, undo: ExitStack, *, on_cuda: bool
) -> tuple[Comm, RollCall]:
    """A group of the same ranks, so that no collective of DDP's or the user's mixes with ours.

    For a model of only some ranks, the others need not take part; but torch then asks that its
    ranks have made the same groups before.
    """
    ranks = dist.get_process_group_ranks(group)
    patience = patience_of(timeout)
    transport = own_transport(
        ranks,
        timeout,
        on_cuda=on_cuda,
        backend=dist.get_backend(group),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    undo.callback(transport.close)
    if (of_job := present()) is not None and ranks == list(range(dist.get_world_size())):
        roll_call = of_job.share()
    else:
        roll_call = RollCall(transport.store(), transport.rank, transport.size, patience)
    undo.callback(roll_call.close)
    return Comm(transport), roll_call


def _install(model: DistributedDataParallel, handle: Handle) -> None:
    """Let DDP's hook call this handle, also where it called one before that was closed."""
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
    arrived = Arrived(bucket.index(), buffer, bucket.parameters(), bucket.is_last(), ready)
    return state.handle.exchanger.submit(arrived)
