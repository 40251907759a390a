# SPDX-License-Identifier: Apache-2.0
"""A hook of an optimizer that calls a function once after every step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

MARK = "counts_local_steps"
HOOKED_STEP = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Of the function by which torch replaces the `step` of every optimizer class, to run hooks."""


def hook_steps(optimizer: Optimizer, after_step: Callable[[], None]) -> RemovableHandle:
    """Call `after_step` after each step of the optimizer, until what is returned is removed.

    Once for each step, though the `step` of a subclass may call that of its parent, whose hooks run
    too. Where the step is compiled, the exchange is not: Dynamo would trace all of it.
    """

    def after(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if _num_running(optimizer) <= 1:
            after_step()

    hook: Any = torch.compiler.disable(after)
    setattr(hook, MARK, True)
    return optimizer.register_step_post_hook(hook)


def is_hooked(optimizer: Optimizer) -> bool:
    """Whether the steps of the optimizer are counted already."""
    return any(hasattr(hook, MARK) for hook in optimizer._optimizer_step_post_hooks.values())


def _num_running(optimizer: Optimizer) -> int:
    """How many calls of the optimizer's `step` are on the stack, each inside the one before.

    Counted there and not by hooks: no hook runs after a step that raised. Names are compared, as
    Dynamo runs a function by code of its own.
    """
    num, frame = 0, sys._getframe()
    name = HOOKED_STEP.co_filename, HOOKED_STEP.co_qualname
    while frame is not None:
        code = frame.f_code
        if (code.co_filename, code.co_qualname) == name:
            num += frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return num
