# SPDX-License-Identifier: Apache-2.0
"""`Task`: what is trained, its options with help and bounds, and checks of what it returns."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from oktopk.errors import RunError
from oktopk.utils.arguments import MOST_SECONDS, MOST_WORKERS, did_you_mean
from oktopk.utils.files import single_line

# The range of each number in a config.
#
# A number outside of its range is refused before anything starts: it would fail later, or never
# end.


MANY = 10**8 - 1
MANY_STEPS = "checkpoints number their steps with 8 digits"
MANY_EXAMPLES = "more examples than fit a step"

RANGES: dict[str, tuple[float, float, str]] = {
    "workers": (1, MOST_WORKERS, "more processes than one machine runs"),
    "seed": (0, 2**63 - 1, "seeds have 63 bits"),
    "timeout": (1.0, MOST_SECONDS, "more than a week"),
    "epochs": (1, 10**6, "more epochs than any run takes"),
    "max_steps": (0, MANY, MANY_STEPS),
    "max_minutes": (0.0, 1e6, "two years"),
    "batch": (1, 65_536, MANY_EXAMPLES),
    "accumulate": (1, 65_536, MANY_EXAMPLES),
    "lr": (0.0, 1000.0, "weights would overflow in a few steps"),
    "lr_decay": (1.0, 10.0, "the learning rate would be 0 after a few epochs"),
    "lr_warmup": (0, MANY, MANY_STEPS),
    "lr_final": (0.0, 1.0, "it is a fraction"),
    "lr_steps": (0, MANY, MANY_STEPS),
    "momentum": (0.0, 1.0, "gradients would add up without end"),
    "beta2": (0.0, 1.0, "moments would never change"),
    "weight_decay": (0.0, 1000.0, "weights would overflow in a few steps"),
    "clip_before": (0.0, 1e30, "0 switches clipping off"),
    "clip_after": (0.0, 1e30, "0 switches clipping off"),
    "density": (0.0, 1.0, "it is a fraction"),
    "warmup_steps": (0, MANY, MANY_STEPS),
    "ramp_steps": (0, MANY, MANY_STEPS),
    "every": (1, MANY, MANY_STEPS),
    "delay": (0, MANY, MANY_STEPS),
    "fragments": (1, MANY, MANY_STEPS),
    "exact_every": (1, MANY, MANY_STEPS),
    "bounds_every": (1, MANY, MANY_STEPS),
    "group_numel": (1, 2**62, "more entries than any model has"),
    "validate_every": (1, 10**6, "more epochs than any run takes"),
    "validate_steps": (0, MANY, MANY_STEPS),
    "validate_batch": (1, 65_536, MANY_EXAMPLES),
    "samples": (0, 10_000, "more than anybody reads"),
    "log_every": (1, MANY, MANY_STEPS),
    "probe_every": (0, MANY, MANY_STEPS),
    "histogram_every": (0, MANY, MANY_STEPS),
    "checkpoint_every": (0, MANY, MANY_STEPS),
    "keep": (1, 10_000, "more than a disk holds"),
}
SMALLEST_RATE = 1e-300
"""Smallest factor that lr_decay may reach in the last epoch."""
LONGEST_NAME = 100
"""Most bytes of a run's name: file names with suffixes must stay below 255."""
LONGEST_PATH = 4096


def check_type(name: str, value: Any, kind: type, *, or_auto: bool = False) -> None:
    """ValueError if a value has another type, is not finite, or is text that no path may have."""
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        wanted = f"{TYPE_NAMES[kind]}{' or auto' * or_auto}"
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if isinstance(value, str):
        _check_text(name, value)


def _check_text(name: str, value: str) -> None:
    """Check text, which is used in file names and config.toml: UTF-8 without control codes."""
    strange = [c for c in value if ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000]
    if strange:
        raise ValueError(f"{name} has the character {strange[0]!r}, which no path may have here")
    if len(value.encode()) > LONGEST_PATH:
        raise ValueError(f"{name} has more than {LONGEST_PATH} bytes: {shown(value)}")


def shown(value: Any) -> str:
    """A wrong value for an error message, shortened if it is long."""
    if not isinstance(value, str | int | float):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and abs(value) >= 10**50:
        return "a number of more than 50 digits"
    text = single_line(repr(value))
    return text if len(text) <= 80 else f"{text[:80]}..."


TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


# Settings as fields of dataclasses, with help texts and bounds that are checked when one is made.
#
# `Config` and the options of every task consist of them. An error names the field and its value.


Bounds = tuple[float, float, str]
"""The least and the largest value, and why there is a largest."""

AUTO = "auto"
"""The value of a setting that the run chooses itself, by its length or by measuring."""


def option(
    default: Any,
    text: str,
    *choices: str,
    bounds: Bounds | None = None,
    or_auto: type | None = None,
    fixed: bool = False,
    harmless: bool = False,
) -> Any:
    """A field with the help text of its flag.

    The value of one with `or_auto` is `auto` or a number of that type. A `fixed` one cannot change
    when a run is resumed, because the saved weights depend on it. A `harmless` one may change
    without a flag, because the training stays the same.
    """
    if not isinstance(default, bool | int | float | str):
        raise ValueError(
            f"the default of an option must be text, a number, True or False, got {default!r}"
        )
    metadata = {"help": text, "choices": choices or None, "bounds": bounds}
    metadata |= {"type": or_auto or type(default), "or_auto": or_auto is not None}
    return field(default=default, metadata=metadata | {"fixed": fixed, "harmless": harmless})


def specs_of(kind: type) -> dict[str, Field[Any]]:
    """The settings of a dataclass, by name."""
    return {spec.name: spec for spec in fields(kind) if "help" in spec.metadata}


def check_options(settings: Any) -> None:
    """Check type, choices and bounds of every field. ValueError names the first that is wrong."""
    check_types(settings)
    for name, spec in specs_of(type(settings)).items():
        if spec.metadata["bounds"] is not None:
            check_bounds(name, getattr(settings, name), spec.metadata["bounds"])


def check_types(settings: Any) -> None:
    """Check type and choices of every field."""
    for name, spec in specs_of(type(settings)).items():
        value = getattr(settings, name)
        if spec.metadata["or_auto"] and value == AUTO:
            continue
        check_type(name, value, spec.metadata["type"], or_auto=spec.metadata["or_auto"])
        choices = spec.metadata["choices"]
        if choices and value not in choices:
            hint = did_you_mean(str(value), choices)
            raise ValueError(
                f"{name} must be one of {', '.join(choices)}, got {shown(value)}{hint}"
            )


def number_or_auto(kind: type) -> Callable[[str], Any]:
    """What reads a number of this type, or `auto`, from text. ValueError if it is neither."""

    def parse(text: str) -> Any:
        return text if text == AUTO else kind(text)

    # argparse names the type in its message
    parse.__name__ = f"{'whole number' if kind is int else 'number'} or auto"
    return parse


def check_bounds(name: str, value: float, bounds: Bounds) -> None:
    """ValueError if the value is below the least or above the largest."""
    least, most, why = bounds
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {shown(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most:g} ({why}), got {shown(value)}")


# `Task`: what is trained. The trainer does everything else.
#
# A task has `num_train` examples to train on and `num_test` to validate with, numbered from 0. The
# trainer decides which rank gets which numbers in which step; the task turns numbers into a batch,
# a batch into a loss, and a batch of test examples into metrics.


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


# What a task must return. Each mistake is a RunError of one line, before the first step.


Rule = tuple[Callable[[Any], bool], str]
"""Whether a value is as it must be, and how it must be."""


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_samples(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_sample, value))


def _is_sample(value: Any) -> bool:
    texts = (*value, *value.values()) if isinstance(value, dict) else ()
    return len(texts) > 0 and all(map(_is_text, texts))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, int | float) for one in value.values())


COUNT: Rule = (_is_count, "a whole number of examples, at least 1")
RULES: dict[str, Rule] = {
    "num_train": COUNT,
    "num_test": COUNT,
    "fingerprint()": (_is_text, "a text, as oktopk.lab.tasks.fingerprint returns it"),
    "build_model()": (lambda value: isinstance(value, nn.Module), "a torch.nn.Module"),
    "summarize()": (_are_numbers, "a dict of numbers (float, not tensors)"),
    "samples()": (_are_samples, "a list of dicts, with a text for each name"),
}
"""The members of a task that are checked."""


def checked(task: Task, member: str, value: Any) -> Any:
    """The value of a member of a task. RunError if it is not as it must be."""
    fits, wanted = RULES[member]
    if not fits(value):
        got = repr(value) if isinstance(value, int | None) else described(value)
        raise RunError(f"{type(task).__name__}.{member} must be {wanted}, got {got}")
    return value


def checked_task(task: Task) -> Task:
    """The task. RunError if it does not say how many examples it has."""
    for member in ("num_train", "num_test"):
        checked(task, member, getattr(task, member, None))
    return task


def check_summary(task: Task, rows: Tensor) -> None:
    """RunError if `summarize` does not return every metric of the task."""
    found = checked(task, "summarize()", task.summarize(rows))
    missing = [metric.name for metric in task.metrics if metric.name not in found]
    if missing:
        known = ", ".join(map(str, found)) or "none"
        raise RunError(
            f"{type(task).__name__}.summarize() must return every metric of the task: "
            f"{missing[0]} is missing, and there is {known}"
        )
