# SPDX-License-Identifier: Apache-2.0
"""What `attach` compares with the other ranks, and what it measures for `method="auto"`."""

from __future__ import annotations

import logging
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.connect import describe_group, describe_parameters
from oktopk.adapters.ddp.parameters import DDPParameterLayout
from oktopk.comm.communicator import Comm
from oktopk.methods.cost_model import Work
from oktopk.methods.prediction import cheapest, probe_kernels, probe_link
from oktopk.settings import Settings, num_kept
from oktopk.sparse import common_acc_dtype

log = logging.getLogger("oktopk")


def describe_model(model: DistributedDataParallel, layout: DDPParameterLayout) -> dict[str, Any]:
    """What must be the same on every rank besides the arguments: versions, group, parameters."""
    return {
        **describe_group(model.process_group),
        "find_unused_parameters": model.find_unused_parameters,
        "static_graph": model.static_graph,
        "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
        **describe_parameters(layout),
    }


def fastest_method(model: DistributedDataParallel, settings: Settings, comm: Comm) -> str:
    """The method with the shortest exchange by measured network and kernels, the same on all ranks.

    One choice for the model: its groups are alike in size, or there is only one.
    """
    device = next(model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    link, speed = probe_link(comm, device), probe_kernels(comm, device)
    kept, dtype = num_kept(numel, settings.density), common_acc_dtype(trained)
    work = Work(numel, kept, comm.size, settings.wire, dtype, short_bytes=settings.short_bytes)
    times = cheapest(work, link, speed)
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
