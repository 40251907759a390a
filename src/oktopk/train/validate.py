# SPDX-License-Identifier: Apache-2.0
"""Metrics on the test examples, the same for any world size.

The test examples are cut into batches once, and the batches are distributed over the ranks: an
example is in the same batch for any world size. Each rank fills in the rows of its examples, and
one allreduce combines them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oktopk.comm.communicator import Comm
from oktopk.errors import RunError
from oktopk.train.tasks.base import Samples, Task, described, to_device
from oktopk.train.tasks.checks import check_summary, checked


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
