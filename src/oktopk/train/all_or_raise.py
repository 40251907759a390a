"""What ranks must have or do alike: if one of them has not, all end together, and say why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import agree
from oktopk.comm.replica_check import check_replicas
from oktopk.errors import OthersError, ReplicaError, RunError
from oktopk.train.config import Config

T = TypeVar("T")
OF_THE_MACHINE = ("runs", "data", "cache", "workers")
"""Settings that may differ from rank to rank: paths, and what a launcher decides anyway."""


def alike(config: Config, resume: bool) -> dict[str, Any]:
    """What every rank must have been started with."""
    of_the_run = {n: v for n, v in asdict(config).items() if n not in OF_THE_MACHINE}
    return {"command": "train", "resume": resume} | of_the_run


def same_data(comm: Comm, device: torch.device, folder: str, fingerprint: str) -> None:
    """Raise on every rank if the recordings of one are others: paths may differ by machine."""
    try:
        agree(comm, device, {"the fingerprint of the data": fingerprint})
    except ValueError as error:
        raise RunError(
            f"the ranks have other recordings ({error}); here they are in {folder}: give all ranks "
            "copies of the same folder with --data"
        ) from error


def same_weights(model: torch.nn.Module, comm: Comm, step: int) -> None:
    """Raise on every rank if one has other weights. One read of them, and 8 bytes per tensor."""
    try:
        check_replicas({n: p.detach() for n, p in model.named_parameters()}, comm, step)
    except ReplicaError as error:
        raise RunError(
            f"{error}. Nothing was saved of this step; the last checkpoint was the same on all "
            "ranks, and --resume goes on from it"
        ) from error


def together(comm: Comm, device: torch.device, what: str, act: Callable[[], T]) -> T:
    """Do what may fail on some ranks. If it did on any, all raise: the cause there, a hint here.

    One header of 4(P-1) bytes; also a barrier.
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
