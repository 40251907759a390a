# SPDX-License-Identifier: Apache-2.0
"""Hooks that call functions once around every step of an optimizer, and notice steps in no hook."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oktopk.optim.flat_views import local_shard

log = logging.getLogger("oktopk")

MARK = "counts_local_steps"
INNER = ("optimizer", "scheduler", "base_optimizer")
"""What wrappers call the optimizer in them: schedulers and Accelerate, Accelerate, SAM."""

UNCOUNTED = 16
"""Backward passes that move the weights without a step, after which that is no coincidence."""

HOOKED_STEP = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Of the function by which torch replaces the `step` of every optimizer class, to run hooks."""


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """The optimizer and those in it, from the outside in, without schedulers and wrappers."""
    found, each = [], optimizer
    for _ in range(4):
        if hasattr(each, "_optimizer_step_post_hooks") and each not in found:
            found.append(each)
        inner = (getattr(each, name, None) for name in INNER)
        each = next((one for one in inner if one is not None), None)
    return found


def hook_steps(
    optimizers: Sequence[Optimizer], before_step: Callable[[], None], after_step: Callable[[], None]
) -> Callable[[], None]:
    """Call these around each step, until what is returned is called.

    `optimizers` are those of `optimizers_of`. A step is one of the innermost, and ends with the
    outermost that is running: SAM's `step` calls that of its base, and its `second_step` does too.
    Once for each step, though the `step` of a subclass may call that of its parent, whose hooks run
    too. Where the step is compiled, the exchange is not: Dynamo would trace all of it.
    """
    ids = [id(each) for each in optimizers]  # the hook would keep an optimizer alive that has it
    has_stepped = False

    def before(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if _num_running(ids, sys._getframe()) <= 1:
            before_step()

    def after(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        nonlocal has_stepped
        has_stepped = has_stepped or id(optimizer) == ids[-1]
        if has_stepped and _num_running(ids, sys._getframe()) <= 1:
            has_stepped = False
            after_step()

    first: Any = torch.compiler.disable(before)
    last: Any = torch.compiler.disable(after)
    setattr(last, MARK, True)
    hooks = ExitStack()
    for optimizer in optimizers:
        hooks.callback(optimizer.register_step_pre_hook(first).remove)
        hooks.callback(optimizer.register_step_post_hook(last).remove)
    return hooks.close


def is_hooked(optimizer: Optimizer) -> bool:
    """Whether the steps of the optimizer are counted already."""
    return any(hasattr(hook, MARK) for hook in optimizer._optimizer_step_post_hooks.values())


def is_stepping(ids: Collection[int], thread: int) -> bool:
    """Whether a thread is inside of a `step` of these optimizers."""
    return _num_running(ids, sys._current_frames().get(thread)) > 0


def _num_running(ids: Collection[int], frame: FrameType | None) -> int:
    """How many calls of `step` of these optimizers are on the stack, each inside the one before.

    Counted there and not by hooks: no hook runs after a step that raised. Names are compared, as
    Dynamo runs a function by code of its own.
    """
    num = 0
    name = HOOKED_STEP.co_filename, HOOKED_STEP.co_qualname
    while frame is not None:
        code = frame.f_code
        if (code.co_filename, code.co_qualname) == name:
            num += id(frame.f_locals["args"][0]) in ids
        frame = frame.f_back
    return num


class UncountedSteps:
    """Warns once where backward passes move the weights though no step is counted.

    Accumulated gradients leave the weights as they are, and a closure is run inside a step. It
    watches the smallest of the parameters, and keeps neither it nor the optimizer alive.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], parameters: Collection[Tensor], *, warns: bool
    ) -> None:
        self._optimizer, self._warns = weakref.ref(optimizers[-1]), warns
        self._num_backwards, self._is_stepping = 0, False
        self._before = torch.empty(0)
        """The watched parameter at the first backward pass since a step."""

        # the last of equals: the end of a model has a gradient in every backward pass
        watched = min(
            reversed(list(parameters)), key=lambda p: local_shard(p).numel() or sys.maxsize
        )
        after_backward = torch.compiler.disable(self._after_backward)
        hooks = ExitStack()
        hooks.callback(watched.register_post_accumulate_grad_hook(after_backward).remove)
        for optimizer in optimizers:
            hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        self.close = hooks.close

    def after_step(self) -> None:
        """A step was counted."""
        self._num_backwards, self._is_stepping = 0, False

    def _before_step(self, *_: object) -> None:
        self._is_stepping = True

    def _after_backward(self, parameter: Tensor) -> None:
        optimizer = self._optimizer()
        if self._is_stepping or optimizer is None:
            return
        now = local_shard(parameter.detach())
        if self._num_backwards == 0:
            self._before = now.clone()
        self._num_backwards += 1
        if self._num_backwards % UNCOUNTED == 0 and not torch.equal(self._before, now):
            self.close()
            if not self._warns:
                return
            log.warning(
                "%d backward passes have moved the weights, and no step() of %s was counted, so "
                "nothing was exchanged: give local_steps the optimizer whose step() you call, or "
                "whose step() moves the weights",
                self._num_backwards,
                type(optimizer).__name__,
            )
