"""What one rank alone does or meets, told to all, so that they go on or end together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from oktopk.comm import Comm
from oktopk.train.errors import OthersError

T = TypeVar("T")


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
