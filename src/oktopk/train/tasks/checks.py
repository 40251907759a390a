# SPDX-License-Identifier: Apache-2.0
"""What a task must return. Each mistake is a RunError of one line, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

from torch import Tensor, nn

from oktopk.errors import RunError
from oktopk.train.tasks.base import Task, described

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
    "fingerprint()": (_is_text, "a text, as oktopk.train.tasks.fingerprint returns it"),
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
