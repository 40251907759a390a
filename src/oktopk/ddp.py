"""`attach`: two lines for a `DistributedDataParallel` model.

DDP calls the hook for every bucket while backward goes on. The hook puts the bucket on a queue and
returns a future; one thread per model exchanges the buckets in order, on a process group of its
own. So the collectives of a rank leave from one thread in one order, and backward waits only at its
end, as with plain DDP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from oktopk.comm import Comm, TorchTransport
from oktopk.costs import Work, cheapest, entry_bits, probe_link, probe_machine
from oktopk.exchanger import Arrived
from oktopk.followed import Followed
from oktopk.handle import Handle
from oktopk.misuse import is_on_cuda, may_overlap, refuse_misuse
from oktopk.policy import Policy
from oktopk.remedies import suited, warn_if_short
from oktopk.rollcall import RollCall, patience_of
from oktopk.settings import Settings, num_kept
from oktopk.stats import StepStats

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
        optimizer: or a scheduler of it; what suits it best is set (`oktopk.remedies`), unless given
            in `more`, and logged. Residuals follow its learning rate: what was saved up under a
            large rate is applied as that rate would have. None: plain error feedback.
        scaler: residuals follow its loss scale, and a NaN is delivered for it to see.
        clip_before: clip this rank's gradient, without the scaler's loss scale, to this norm before
            the exchange. The norm needs the last bucket, so nothing overlaps with backward. To
            clip after the exchange, call `clip_grad_norm_` as always.
        total_steps: how long the run will be, to warn when it ends before the sparse phase.
        timeout: seconds a rank waits for the others before it raises. The last third of them, at
            most 5 s, is for finding out who is missing.
        check_every: steps between comparisons of the weights of all ranks; 0 is never.
        more: the other fields of `oktopk.settings.Settings`.
    """
    refuse_misuse(model, timeout, clip_before, check_every)
    if scaler is not None:
        more.setdefault("on_nonfinite", "deliver")
    followed = Followed(optimizer, scaler)
    asked = "oktopk" if method == "auto" else method
    settings = Settings(method=asked, density=density, warmup_steps=warmup_steps, **more)
    first = dist.get_rank(model.process_group) == 0
    settings = suited(followed.optimizer, settings, ramp_steps, more, tells=first)
    if total_steps is not None and method != "dense":
        warn_if_short(settings, total_steps)
    comm, roll_call = _own_group(model.process_group, timeout, on_cuda=is_on_cuda(model))
    if method == "auto":
        settings = replace(settings, method=_chosen(model, settings, comm))
    handle = Handle(model, settings, comm, roll_call, policy or Policy(), followed)
    handle.on_step, handle.clip_before, handle.check_every = on_step, clip_before, check_every
    handle.takes_any_method = method == "auto"
    handle.overlaps = may_overlap(model)
    try:
        model.register_comm_hook(handle, _hook)
    except BaseException:
        handle.close()
        raise
    return handle


def _chosen(model: DistributedDataParallel, settings: Settings, comm: Comm) -> str:
    """The method with the shortest exchange by measured network and kernels, the same on all ranks.

    One choice for the model: its groups are alike in size, or there is only one.
    """
    device = next(model.parameters()).device
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    link, machine = probe_link(comm, device), probe_machine(comm, device)
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    bits = 96.0 if wide else entry_bits(settings.wire, settings.density)
    kept, value_bytes = num_kept(numel, settings.density), 8 if wide else 4
    times = cheapest(Work(numel, kept, comm.size, bits, value_bytes), link, machine)
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


def _own_group(group: Any, timeout: float, *, on_cuda: bool) -> tuple[Comm, RollCall]:
    """A group of the same ranks, so that no collective of DDP's or the user's mixes with ours.

    For a model of only some ranks, the others need not take part; but torch then asks that its
    ranks have made the same groups before.
    """
    ranks = dist.get_process_group_ranks(group)
    patience = patience_of(timeout)
    limit = timeout - patience
    own = dist.new_group(
        ranks,
        # NCCL ends the process at its limit, so ours must come first, and leave time to say who
        timeout=timedelta(seconds=2 * timeout if on_cuda else limit),
        backend=dist.get_backend(group),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    transport = TorchTransport(own, owned=True, timeout=limit)
    return Comm(transport), RollCall(transport.store(), transport.rank, transport.size, patience)


def _hook(handle: Handle, bucket):  # noqa: ANN001, ANN202 - DDP refuses annotations kept as text
    buffer, ready = bucket.buffer(), None
    if buffer.is_cuda:
        ready = torch.cuda.Event()
        ready.record()
    arrived = Arrived(bucket.index(), buffer, bucket.parameters(), bucket.is_last(), ready)
    return handle.exchanger.submit(arrived)
