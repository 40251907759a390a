# SPDX-License-Identifier: Apache-2.0
"""Hooks of an optimizer that call a function once after every step."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class StepHooks:
    """Counts a step once, though the `step` of a subclass may call that of its parent."""

    def __init__(self, after_step: Callable[[], None]) -> None:
        self._after_step = after_step
        self._depth = 0

    def before(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        # After a step that raised, no post-hook has run.
        if self._depth >= _num_hooked(optimizer):
            self._depth = 0
        self._depth += 1

    def after(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0:
            self._after_step()


def hook_steps(optimizer: Optimizer, after_step: Callable[[], None]) -> list[RemovableHandle]:
    """Call `after_step` after each step of the optimizer, until what is returned is removed."""
    hooks = StepHooks(after_step)
    return [
        optimizer.register_step_pre_hook(hooks.before),
        optimizer.register_step_post_hook(hooks.after),
    ]


def is_hooked(optimizer: Optimizer) -> bool:
    """Whether the steps of the optimizer are counted already."""
    hooks = optimizer._optimizer_step_post_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), StepHooks) for hook in hooks)


def _num_hooked(optimizer: Optimizer) -> int:
    """Classes of the optimizer whose `step` runs hooks: torch patches that of every class which has
    had an instance."""
    steps = [vars(kind).get("step") for kind in type(optimizer).__mro__]
    return max(1, sum(getattr(step, "hooked", False) for step in steps))
