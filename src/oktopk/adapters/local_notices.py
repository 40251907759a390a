# SPDX-License-Identifier: Apache-2.0
"""What `local_steps` notices around steps, and what the ranks tell each other before an
exchange.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oktopk.adapters.parameters import ParameterLayout
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import ranks_text
from oktopk.exchange.saved_state import clean_name
from oktopk.optim.staleness import local_shard
from oktopk.utils.device import to_device

# Hooks that call functions once around every step of an optimizer, and notice steps in no hook.


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


# Parameters that are trained and not exchanged.


class Outside:
    """The parameters of a model and its optimizer that are in no exchange.

    A parameter of the model that did not require gradients when `local_steps` was called may be
    trained for a few steps and be frozen again before an exchange: so each step is looked at.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, parts: Sequence[ParameterLayout]
    ) -> None:
        self._model, self._optimizer = model, ref(optimizer)
        self._exchanged = {id(p) for part in parts for p in part.parameters.values()}
        self._frozen: list[Tensor] = []
        """Parameters of the model that the optimizer has and no exchange."""

        self._moved: set[int] = set()
        """Those of them that a step has moved, by id."""

        self._num_strangers = 0

    def after_step(self) -> None:
        """Look for frozen parameters that the step had a gradient for."""
        for p in self._frozen:
            if p.grad is not None:
                self._moved.add(id(p))

    def check(self, where: str, *, warns: bool) -> None:
        """Warn of parameters that are not in the model; ValueError for those of the model."""
        named = dict(self._model.named_parameters())
        inside = {id(p) for p in named.values()}
        optimizer = self._optimizer()
        groups = [group["params"] for group in optimizer.param_groups] if optimizer else []
        self._frozen = [
            p for ps in groups for p in ps if id(p) in inside and id(p) not in self._exchanged
        ]
        strangers = [
            f"parameter {place} of group {number} with the shape {list(p.shape)}"
            for number, ps in enumerate(groups)
            for place, p in enumerate(ps)
            if p.requires_grad and id(p) not in inside
        ]
        if warns and len(strangers) > self._num_strangers:
            _warn(strangers, type(optimizer).__name__)
        self._num_strangers = len(strangers)
        trained = {name: p for name, p in named.items() if p.requires_grad or id(p) in self._moved}
        if new := [clean_name(name) for name, p in trained.items() if id(p) not in self._exchanged]:
            raise ValueError(
                f"{where}: {new} are trained and not exchanged, as they were not in the model or "
                "did not require gradients when local_steps was called: close() the handle and "
                "call local_steps again"
            )


def _warn(strangers: list[str], optimizer: str) -> None:
    more = f" and {len(strangers) - 4} more" if len(strangers) > 4 else ""
    log.warning(
        "%s trains parameters that are not in the model that local_steps was given, so they are "
        "not exchanged and differ from rank to rank: %s; let the model have them as a submodule "
        "(nn.ModuleList([model, head])), or train them with an optimizer of their own",
        optimizer,
        ", ".join(strangers[:4]) + more,
    )


# What the ranks tell each other before each exchange, so that they decide together.
#
# A condition that differs between ranks must not guard a collective. So every rank tells what it
# knows in one header of fixed size, and all of them decide from the same numbers.


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """What one rank tells the others. Whole numbers: each field takes 8 bytes."""

    num_written: int
    """Parameters that something else than the optimizer has written since the last exchange."""

    fragment: int
    """The number of the fragment that is exchanged."""

    num_steps: int
    """Optimizer steps since the start, a load, or the last end of `finish`."""

    has_finished: int
    """1 if this rank only answers the others, in `finish`."""

    moves: int
    """A checksum of the weight change until the ranks have compared it; 0 afterwards, and if there
    is none."""

    @property
    def is_possible(self) -> bool:
        """Whether a rank can have told this; else it was damaged on the way."""
        return min(self.num_written, self.fragment, self.num_steps) >= 0 <= self.has_finished <= 1


def tell(mine: Notice, comm: Comm, device: torch.device) -> list[Notice]:
    """What all ranks tell, in rank order. Header: 8 bytes for each field, to every other rank."""
    words = to_device(list(astuple(mine)), torch.int64, device)
    rows = comm.all_gather_header(words, stage="agreement").tolist()
    names = list(Notice.__dataclass_fields__)
    notices = [Notice(**dict(zip(names, row, strict=True))) for row in rows]
    for peer in comm.peers:
        comm.expect(notices[peer].is_possible, peer)
    return notices


def by_value(values: Sequence[int], ranks: Sequence[int]) -> str:
    """`40 on ranks 0, 2 and 37 on rank 1`, of one value for each of the ranks."""
    having: dict[int, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        having.setdefault(value, []).append(rank)
    return " and ".join(f"{value} on {ranks_text(those)}" for value, those in having.items())
