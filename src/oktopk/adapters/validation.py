# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that several adapters take, before a rank waits for another."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from oktopk.adapters.policy import Policy
from oktopk.comm.communicator import Comm
from oktopk.comm.process_groups import timeout_of
from oktopk.utils.arguments import number, short_repr

MOST_SECONDS = 10**7  # about four months: larger ones overflow in the C++ of the process group


def time_limit(timeout: Any, group: dist.ProcessGroup | None) -> float:
    """A time limit; None is that of the process group."""
    if timeout is None:
        return min(timeout_of(group), MOST_SECONDS)
    limit = number("timeout", timeout, "more than 0 seconds")
    if not 0 < limit <= MOST_SECONDS:
        raise ValueError(
            f"timeout must be more than 0 seconds and at most {MOST_SECONDS}, got {timeout}"
        )
    return limit


def check_types(*, policy: object, on_step: object, comm: object) -> None:
    """Raise TypeError or ValueError for arguments of other types, or a communicator in use."""
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy must be an oktopk.Policy, got {short_repr(policy)}")
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step must be a function of a StepStats, got {short_repr(on_step)}")
    if comm is None:
        return
    if not isinstance(comm, Comm):
        raise TypeError(f"comm must be an oktopk.Comm, got {short_repr(comm)}")
    if comm.is_attached:
        raise ValueError("this comm serves another attached model: close() its handle first")


def check_devices(parameters: Collection[Tensor], backends: str, call: str) -> None:
    """Raise TypeError where the parameters are not on one device that the process group serves.

    `backends` are those of the process group, `cpu:gloo,cuda:nccl` for instance.
    """
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise TypeError(
            f"the parameters are on several devices ({', '.join(devices)}): {call} needs all of "
            "them on one, with one process for each device"
        )
    kind = devices[0].split(":")[0]
    by_kind = dict(part.split(":") for part in backends.split(",") if part)
    if kind != "cpu" and by_kind.get(kind) == "gloo":
        raise TypeError(
            f"the parameters are on {devices[0]} and the process group is gloo, which sends from "
            "rank to rank on CPUs only: use init_process_group('nccl'), or a model on the CPU"
        )


def check_optimizer(optimizer: Optimizer, parameters: Iterable[Tensor], advice: str) -> None:
    """Raise ValueError, with advice, for an optimizer that has none of these parameters."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if trained.isdisjoint(id(p) for p in parameters):
        name = type(optimizer).__name__
        raise ValueError(f"{name} has none of the model's parameters: {advice}")


def is_on_cuda(model: nn.Module) -> bool:
    """Whether the messages travel by NCCL."""
    return any(parameter.is_cuda for parameter in model.parameters())
