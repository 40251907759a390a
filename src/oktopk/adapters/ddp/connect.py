"""What `attach` does with the other ranks: compare, connect, and measure for `method="auto"`."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.ddp.parameters import ParameterLayout
from oktopk.adapters.ddp.validation import is_on_cuda
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import PROTOCOL, check_consistency_through_store
from oktopk.comm.failure_detector import (
    FailureDetector,
    StoreFailureDetector,
    detection_seconds,
    job_detector,
)
from oktopk.comm.process_groups import new_transport
from oktopk.comm.torch_transport import TorchTransport
from oktopk.methods.cost_model import Work
from oktopk.methods.prediction import cheapest, probe_kernels, probe_link
from oktopk.settings import Settings, num_kept
from oktopk.version import __version__
from oktopk.wire.codec import entry_bits, size_rounds

log = logging.getLogger("oktopk")


def describe_model(model: DistributedDataParallel, layout: ParameterLayout) -> dict[str, Any]:
    """What must be the same on every rank besides the arguments: versions, group, parameters."""
    values: dict[str, Any] = {
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
        values[f"parameter {name!r}"] = f"{list(p.shape)} {p.dtype} {p.device.type} {travels}"
    return values


def agree_by_store(
    group: Any, timeout: float, values: dict[str, Any], call: str, prefix: str
) -> str:
    """Compare what all ranks are about to do, before any collective: ranks that differ abort."""
    transport = TorchTransport(group)
    return check_consistency_through_store(
        transport.store, transport.rank, transport.size, timeout, values, call, prefix
    )


def fastest_method(model: DistributedDataParallel, settings: Settings, comm: Comm) -> str:
    """The method with the shortest exchange by measured network and kernels, the same on all ranks.

    One choice for the model: its groups are alike in size, or there is only one.
    """
    device = next(model.parameters()).device
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    link, speed = probe_link(comm, device), probe_kernels(comm, device)
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    bits = 96.0 if wide else entry_bits(settings.wire, settings.density)
    kept, value_bytes = num_kept(numel, settings.density), 8 if wide else 4
    rounds = 0 if wide else size_rounds(settings.wire)
    times = cheapest(Work(numel, kept, comm.size, bits, value_bytes, rounds), link, speed)
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


def connect(
    model: DistributedDataParallel, timeout: float, comm: Comm | None, undo: ExitStack
) -> tuple[Comm, FailureDetector]:
    """The communicator, over a new group of the model's ranks unless one is given, and the failure
    detector.

    With a group of its own, no collective of DDP's or the user's mixes with those of the exchange.
    For a model of only some ranks, the others need not take part; but torch then asks that its
    ranks have made the same groups before.
    """
    group = model.process_group
    ranks = dist.get_process_group_ranks(group)
    if comm is None:
        transport = new_transport(
            ranks,
            timeout,
            on_cuda=is_on_cuda(model),
            backend=dist.get_backend(group),
            whole_job=len(ranks) == dist.get_world_size(),
        )
        undo.callback(transport.close)
        comm = Comm(transport)
        store = transport.store
    else:
        store = TorchTransport(group).store
    shared = job_detector()
    if shared is not None and ranks == list(range(dist.get_world_size())):
        failure_detector = shared.share()
    else:
        seconds = detection_seconds(timeout)
        failure_detector = StoreFailureDetector(store(), comm.rank, comm.size, seconds)
    undo.callback(failure_detector.close)
    return comm, failure_detector
