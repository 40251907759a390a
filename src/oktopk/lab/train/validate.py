# SPDX-License-Identifier: Apache-2.0
"""Metrics on the test examples, and checks that all ranks pass or all ranks raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import check_consistency, check_replicas
from oktopk.errors import OthersError, ReplicaError, RunError
from oktopk.lab.tasks.base import Samples, Task, check_summary, checked, described, to_device
from oktopk.lab.train.config import Config, as_dict

# Metrics on the test examples, the same for any world size.
#
# The test examples are cut into batches once, and the batches are distributed over the ranks: an
# example is in the same batch for any world size. Each rank fills in the rows of its examples, and
# one allreduce combines them.


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Metrics of the model on the test examples."""

    metrics: dict[str, float]
    examples: int
    samples: Samples


def validate(
    task: Task, model: nn.Module, comm: Comm, device: torch.device, *, batch: int, samples: int
) -> Validation:
    """Evaluate the test examples. Collective."""
    average_statistics(model, comm)
    rows = torch.zeros(task.num_test, task.num_columns, dtype=torch.float64)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for indices in shard(task.num_test, batch, comm.size, comm.rank):
            part = to_device(task.test_batch(indices), device)
            rows[indices] = _rows(task, model, part, len(indices))
        shown = task.samples(model, samples) if comm.rank == 0 and samples else []
    model.train(was_training)
    # each row is nonzero on one rank only, so the sum is exact
    rows = comm.all_reduce_(rows.to(device), stage="validation").cpu()
    return Validation(metrics=task.summarize(rows), examples=len(rows), samples=shown)


def check_evaluate(
    task: Task, model: nn.Module, device: torch.device, samples: bool = False
) -> None:
    """Evaluate two test examples, so that a wrong `evaluate` or `summarize` shows before training.

    With `samples` also that of `samples`, which one rank alone calls.
    """
    indices = list(range(min(2, task.num_test)))
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        rows = _rows(task, model, to_device(task.test_batch(indices), device), len(indices))
        if samples:
            checked(task, "samples()", task.samples(model, 1))
    model.train(was_training)
    check_summary(task, rows)


def _rows(task: Task, model: nn.Module, batch: object, number: int) -> Tensor:
    rows = task.evaluate(model, batch)
    if not isinstance(rows, Tensor) or rows.shape != (number, task.num_columns):
        names = ", ".join(metric.name for metric in task.metrics)
        raise RunError(
            f"{type(task).__name__}.evaluate must return a tensor with a row for each of {number} "
            f"examples and {task.num_columns} columns (the metrics are {names}), got "
            f"{described(rows)}"
        )
    return rows.to("cpu", torch.float64)


def shard(count: int, batch: int, ranks: int, rank: int) -> list[list[int]]:
    """This rank's batches for validation. Over all ranks, every example is in one batch.

    The last batch may be short, and the number of batches may differ by one between ranks: no
    collective may be called between them.
    """
    bins = [list(range(i, min(i + batch, count))) for i in range(0, count, batch)]
    return bins[rank::ranks]


def average_statistics(model: nn.Module, comm: Comm) -> None:
    """Average the batch-norm statistics over ranks, as each computes those of its own batches."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = comm.all_reduce_(torch.cat([buffer.flatten() for buffer in buffers]), stage="validation")
    flat /= comm.size
    for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(part.view(buffer.shape))


def is_validated(epoch: int, epochs: int, every: int) -> bool:
    """Whether epoch `epoch` (from 0) of `epochs` is validated: 0, every-1, 2 every-1, ..., last."""
    return epoch == 0 or (epoch + 1) % every == 0 or epoch == epochs - 1


# Checks and actions that all ranks pass, or all ranks raise an error.


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
