# SPDX-License-Identifier: Apache-2.0
"""Checks and actions that all ranks pass, or all ranks raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import check_consistency
from oktopk.comm.replica_check import check_replicas
from oktopk.errors import OthersError, ReplicaError, RunError
from oktopk.train.config import Config, as_dict

T = TypeVar("T")
PER_RANK_SETTINGS = ("runs", "data", "cache", "workers")
"""Settings that may differ between ranks: paths, and `workers`, which a launcher overrides."""


def shared_settings(config: Config, resume: bool) -> dict[str, Any]:
    """The settings that must be the same on every rank."""
    shared = {n: v for n, v in as_dict(config).items() if n not in PER_RANK_SETTINGS}
    return {"command": "train", "resume": resume} | shared


def check_same_data(comm: Comm, device: torch.device, folder: str, fingerprint: str) -> None:
    """Raise on every rank if one has different data. Their paths may differ."""
    try:
        check_consistency(comm, device, {"the fingerprint of the data": fingerprint})
    except ValueError as error:
        raise RunError(
            f"the ranks have different data ({error}); this rank reads {folder}: give all ranks "
            "copies of the same data with --data"
        ) from error


def check_same_weights(model: torch.nn.Module, comm: Comm, step: int) -> None:
    """Raise on every rank if one has different weights. Reads them once; 8 bytes per tensor."""
    try:
        check_replicas({n: p.detach() for n, p in model.named_parameters()}, comm, step)
    except ReplicaError as error:
        raise RunError(
            f"{error}. Nothing was saved of this step; the last checkpoint was the same on all "
            "ranks, and --resume continues from it"
        ) from error


def all_or_raise(comm: Comm, device: torch.device, what: str, act: Callable[[], T]) -> T:
    """Call `act`, and raise on all ranks if it failed on any. Collective, and a barrier.

    The ranks where it failed raise its error, the others an `OthersError` that names one of them.
    Each rank sends a header of 4(P-1) bytes.
    """
    failure, result = None, None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 - raised below, once the others know
        failure = error
    flags = comm.all_gather_size(int(failure is not None), device, stage="run")
    failed = [rank for rank, bad in enumerate(flags) if bad]
    if failure is not None:
        raise failure
    if failed:
        raise OthersError(
            f"rank {comm.rank} stops because {what} failed on rank {failed[0]}; see its message"
        )
    return result  # pyright: ignore[reportReturnType] - act returned it
