# SPDX-License-Identifier: Apache-2.0
"""Hooks around an optimizer's step, shared by all handles that are attached to that optimizer.

What a handle changes for the time of a step (second moments, beta1) is changed after the user's own
pre-hooks and put right before the user's own post-hooks, so nobody sees or saves it.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol

import torch
from torch import Tensor

from oktopk.stats import StepStats


class Member(Protocol):
    """What one handle does around a step."""

    def exchanged(self) -> StepStats | None:
        """The exchange whose gradients the step is about to use."""
        ...

    def before_step(self) -> dict[int, float]:
        """Prepare the step; the largest beta1 that it may use, by the id of a parameter."""
        ...

    def after_step(self) -> None: ...

    def undo(self) -> None:
        """Take back what `before_step` did, if `after_step` never came."""
        ...


class StepHooks:
    """The hooks of one optimizer; `join` finds the one that is there already."""

    def __init__(self, optimizer: Any) -> None:
        self._members: list[Member] = []
        self._whole: list[dict[str, Any]] | None = None
        """The parameter groups as the user made them, while the optimizer has split ones."""
        self._parts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._prepared: list[StepStats | None] | None = None
        """The exchanges that a step was prepared for and not ended yet."""
        self._pre = optimizer.register_step_pre_hook(self._on_step)
        self._post = optimizer.register_step_post_hook(lambda opt, *_: self._after(opt))
        self._saving = optimizer.register_state_dict_pre_hook(self._undo)

    @classmethod
    def join(cls, optimizer: Any, member: Member) -> StepHooks:
        owners = [getattr(h, "__self__", 0) for h in optimizer._optimizer_step_pre_hooks.values()]
        found = [owner for owner in owners if isinstance(owner, cls)]
        hooks = found[0] if found else cls(optimizer)
        hooks._members.append(member)
        return hooks

    def leave(self, optimizer: Any, member: Member) -> None:
        """Take back what is under way and forget the member. The last one removes the hooks."""
        self._undo(optimizer)
        self._members = [other for other in self._members if other is not member]
        if not self._members:
            for hook in (self._pre, self._post, self._saving):
                hook.remove()

    def _on_step(self, optimizer: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Before the step; with a closure, after it: only then are the gradients there."""
        # the user may have registered hooks since: the lists of the two kinds are reordered in
        # turn, because the one that is being walked through must not change
        optimizer._optimizer_step_post_hooks.move_to_end(self._post.id, last=False)
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            self._before(optimizer)
            return None

        def computed() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._before(optimizer)
            return loss

        if "closure" in kwargs:
            return args, kwargs | {"closure": computed}
        return (args[0], computed, *args[2:]), kwargs

    def _before(self, optimizer: Any) -> None:
        exchanges = [member.exchanged() for member in self._members]
        if self._prepared is not None and all(map(operator.is_, exchanges, self._prepared)):
            return  # the `step` of a subclass calls that of its parent, whose hooks run too
        self._undo(optimizer)  # after a step that raised
        self._prepared = exchanges
        caps: dict[int, float] = {}
        for member in self._members:
            caps |= member.before_step()
        self._split(optimizer, caps)

    def _after(self, optimizer: Any) -> None:
        self._merge(optimizer)
        self._prepared = None
        for member in self._members:
            member.after_step()
        optimizer._optimizer_step_pre_hooks.move_to_end(self._pre.id)

    def _undo(self, optimizer: Any) -> None:
        self._merge(optimizer)
        self._prepared = None
        for member in self._members:
            member.undo()

    def _split(self, optimizer: Any, caps: dict[int, float]) -> None:
        """Give the parameters that have a cap groups of their own, with a lower beta1.

        Adam reads beta1 from the group, for the average and for its bias correction, so this is
        exact for every form of Adam. Correcting `exp_avg` instead would need the gradient that the
        step will see (weight decay, loss scale, `maximize`) and two more passes over n.
        """
        split = []
        for group in optimizer.param_groups:
            parts = _parts(group, caps)
            self._parts += [(group, part) for part in parts if part is not group]
            split += parts
        if self._parts:
            self._whole = list(optimizer.param_groups)
            optimizer.param_groups[:] = split  # in place: wrappers share the list

    def _merge(self, optimizer: Any) -> None:
        if self._whole is None:
            return
        # some optimizers count their steps in the group
        changes = [(group, _changes(group, part)) for group, part in self._parts]
        for group, changed in changes:
            group.update(changed)
        optimizer.param_groups[:] = self._whole
        self._whole, self._parts = None, []


def _parts(group: dict[str, Any], caps: dict[int, float]) -> list[dict[str, Any]]:
    """The group itself if nothing in it has a lower cap; or its parts, one for each cap."""
    by_cap: dict[float | None, list[Tensor]] = {}
    for parameter in group["params"]:
        by_cap.setdefault(caps.get(id(parameter)), []).append(parameter)
    parts = []
    for cap, parameters in by_cap.items():
        lowered = {} if cap is None else _lowered(group["betas"], cap)
        parts.append(group | {"params": parameters} | lowered)
    return parts if any(part["betas"] is not group["betas"] for part in parts) else [group]


def _changes(group: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in part.items()
        if key not in ("params", "betas") and (key not in group or value is not group[key])
    }


def _lowered(betas: tuple, cap: float) -> dict[str, tuple]:
    first, *others = betas
    if isinstance(first, Tensor):  # of a `capturable` Adam: comparing it would wait for the device
        return {"betas": (first.clamp(max=cap), *others)}
    return {"betas": (cap, *others)} if first > cap else {}
