# SPDX-License-Identifier: Apache-2.0
"""What an adapter does with the other ranks before it starts: compare settings, and connect."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from oktopk.adapters.parameters import ParameterLayout
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
from oktopk.version import __version__


def describe_group(group: Any) -> dict[str, Any]:
    """Versions and process group, which must be the same on every rank."""
    return {
        "oktopk": __version__,
        "protocol": PROTOCOL,
        "world size": dist.get_world_size(group),
        "backend": dist.get_backend_config(group),
    }


def describe_parameters(layout: ParameterLayout) -> dict[str, Any]:
    """Order, shapes and dtypes of the parameters, which must be the same on every rank."""
    values: dict[str, Any] = {"order of parameters": " ".join(layout.parameters)}
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
        transport.store, dist.get_rank(), transport.global_ranks, timeout, values, call, prefix
    )


def connect(
    group: Any, timeout: float, comm: Comm | None, undo: ExitStack, *, on_cuda: bool
) -> tuple[Comm, FailureDetector]:
    """The communicator, over a new group of the same ranks unless one is given, and the failure
    detector.

    With a group of its own, no collective of DDP's or the user's mixes with those of the exchange.
    For a group of only some ranks, the others need not take part; but torch then asks that its
    ranks have made the same groups before.
    """
    ranks = dist.get_process_group_ranks(group)
    if comm is None:
        transport = new_transport(
            ranks,
            timeout,
            on_cuda=on_cuda,
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
        failure_detector = StoreFailureDetector(store(), dist.get_rank(), ranks, seconds)
    undo.callback(failure_detector.close)
    return comm, failure_detector
