# SPDX-License-Identifier: Apache-2.0
"""`Task`: what is trained. The trainer does everything else.

A task has `num_train` examples to train on and `num_test` to validate with, numbered from 0. The
trainer decides which rank gets which numbers in which step; the task turns numbers into a batch, a
batch into a loss, and a batch of test examples into metrics.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from oktopk.errors import RunError
from oktopk.train.option import check_options, option

ORDER = 0
"""The stream of random numbers that orders the examples of an epoch."""

Samples = list[dict[str, str]]
"""A few test examples as text, such as `{"said": ..., "heard": ...}`; the keys are column names."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number by which the model is judged on the test examples."""

    name: str
    """As in `metrics.jsonl` and in `--until`: letters, digits and underscores."""

    label: str = ""
    """As people write it; the name if it is empty."""

    higher_is_better: bool = False

    shown: bool = True
    """Whether the terminal and the tables show it. `metrics.jsonl` has all metrics."""

    best: float | None = None
    """The best value there can be, such as 1 for an accuracy. `--until` refuses what is beyond."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"a metric's name must be an identifier, got {self.name!r}")
        best = self.best
        if best is not None and not (isinstance(best, int | float) and math.isfinite(best)):
            raise ValueError(f"metric {self.name}: best must be a number or None, got {best!r}")
        if not self.label:
            object.__setattr__(self, "label", self.name.replace("_", " "))


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """The settings of a task. Every field made by `option` is a flag of `oktopk train`."""

    data: str = option("", "where the data is", harmless=True)

    def __post_init__(self) -> None:
        check_options(self)


class Task(ABC):
    """What is trained. One is made on every rank, before the model.

    `metrics` come in order of importance: the first is the one that reports show first.
    `defaults` are values for the flags of `oktopk train` that suit this task.
    """

    metrics: ClassVar[tuple[Metric, ...]]
    options_type: ClassVar[type[TaskOptions]] = TaskOptions
    defaults: ClassVar[Mapping[str, Any]] = {}
    unit: ClassVar[str] = "examples"
    """What an example is called, in the plural."""

    num_train: int
    num_test: int

    def __init__(self, options: Any, seed: int) -> None:
        """Read the data. `options` is an `options_type`; `seed` is that of the run."""
        self.options, self.seed = options, seed

    @classmethod  # noqa: B027 - there may be nothing to check
    def check(cls, options: Any) -> None:
        """Raise a `FileError` or `ValueError`, in one line, if the data cannot be used.

        Called before any worker starts, so it should be quick.
        """

    @classmethod  # noqa: B027 - there may be nothing to prepare
    def prepare(cls, options: Any) -> None:
        """Get, check and cache the data. Called before any worker starts, and again on one rank of
        every machine before the others read it: it should find what it has cached."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the data, which must be the same on all ranks and when a run is resumed."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model with its initial weights. The random generator is seeded; rank 0's count."""

    @abstractmethod
    def train_batch(self, indices: list[int], epoch: int) -> Any:
        """A batch of training examples: tensors, or tuples, lists or dicts of tensors.

        Random choices must depend on (seed, epoch, example) alone, so that a resumed run makes the
        same; `self.random(epoch, index)` has a generator for that.
        """

    @abstractmethod
    def test_batch(self, indices: list[int]) -> Any:
        """A batch of test examples, without random choices."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch, on the model's device. `model` may be wrapped in DDP."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Any) -> Tensor:
        """One row for each test example, in the order of its numbers, and a column per metric."""

    @property
    def num_columns(self) -> int:
        """Columns of the rows that `evaluate` returns."""
        return len(self.metrics)

    def summarize(self, rows: Tensor) -> dict[str, float]:
        """The metrics from the rows of all test examples, which are on all ranks: their means."""
        means = rows.mean(0).tolist()
        return {metric.name: mean for metric, mean in zip(self.metrics, means, strict=True)}

    def samples(self, model: nn.Module, number: int) -> Samples:
        """A few results as text, for people. Called on rank 0 after each validation."""
        return []

    def steps(self, epoch: int, batch: int, ranks: int) -> list[list[list[int]]]:
        """The examples of every step and rank in an epoch: `steps(...)[step][rank]`.

        Examples that do not fill a last step are left out; which ones changes with the epoch.
        """
        count = self.num_train // (batch * ranks)
        order = np.random.default_rng([ORDER, self.seed, epoch]).permutation(self.num_train)
        # dealt in turn, so that 4 ranks with batch 4 take the steps of 1 rank with batch 16
        dealt = order[: count * batch * ranks].reshape(count, batch, ranks).transpose(0, 2, 1)
        return dealt.tolist()

    def uses_weight_decay(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether the optimizer decays a parameter."""
        return True

    def random(self, epoch: int, index: int) -> np.random.Generator:
        """Random numbers for one example in one epoch."""
        return np.random.default_rng([1, self.seed, epoch, index])

    def describe(self) -> str:
        """The data in a few words, for the first line of a run."""
        return f"{self.num_train:,} + {self.num_test:,} {self.unit}"


def fingerprint(*parts: Tensor | str | bytes) -> str:
    """A hash of tensors and text, for `Task.fingerprint`."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
            digest.update(part.contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()


def described(value: Any) -> str:
    """What a task returned, for messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on a device."""
    if isinstance(batch, tuple | list):
        moved = [to_device(part, device) for part in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if isinstance(batch, dict):
        return {key: to_device(part, device) for key, part in batch.items()}
    if isinstance(batch, np.ndarray):
        raise RunError(
            "a batch of this task has a NumPy array: let train_batch and test_batch return tensors "
            "(torch.from_numpy), or tuples, lists or dicts of them"
        )
    return batch.to(device) if hasattr(batch, "to") else batch
