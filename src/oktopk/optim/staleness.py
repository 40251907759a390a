# SPDX-License-Identifier: Apache-2.0
"""`StalenessCorrection`: Adam's moments for gradients that accumulated before they arrived.

An entry that accumulated for `age` steps arrives as one sum S. Adam would add S^2 to its second
moment, though each of the gradients in S was small. That slows the entries that matter down by up
to the square root of their age. Besides, Adam's first moment averages over ten steps what is an
average over many steps already; `Settings.max_beta1` lowers that if the user asks for it.
"""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, NAdam, RAdam

from oktopk import kernels
from oktopk.kernels.reference import arrival_mask
from oktopk.optim.residual_scaling import local_optimizer
from oktopk.settings import Settings
from oktopk.stats import StepStats

# Tensors of one shape as flat ones, in the order of memory where they have it in common.


T = TypeVar("T", Tensor, Tensor | None)
CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


def is_dtensor(x: object) -> bool:
    """Whether it is a DTensor. torch's module of them takes half a second to import: where nobody
    else has, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_shard(x: T) -> T:
    """This rank's shard of a DTensor, sharing its memory; any other tensor, or None, as it is."""
    return x._local_tensor.detach() if is_dtensor(x) else x  # pyright: ignore


def stored_alike(*tensors: Tensor) -> bool:
    """Whether they lie in memory in one and the same order, without gaps."""
    first, orders = tensors[0], (torch.contiguous_format, *CHANNELS_LAST)
    whole = any(first.is_contiguous(memory_format=order) for order in orders)
    return whole and all(other.stride() == first.stride() for other in tensors)


def flattened(x: Tensor, as_stored: bool) -> Tensor:
    """A view in the order of memory, or the values in the order of indices, which may be a copy."""
    x = x.detach()
    return x.as_strided((x.numel(),), (1,)) if as_stored else x.contiguous().view(-1)


def put_back(x: Tensor, flat: Tensor) -> None:
    """Take over what was changed, if it was changed in a copy."""
    if flat.data_ptr() != x.data_ptr():
        x.copy_(flat.view_as(x))


def set_at(x: Tensor, as_stored: bool, where: Tensor, values: Tensor) -> None:
    flat = flattened(x, as_stored)
    flat[where] = values
    put_back(x, flat)


# The second moment in an optimizer's state: where it is, and whether Adam's rule updates it.


KNOWN = (Adam, AdamW, NAdam, RAdam)
"""Adam's rule, `beta2 * exp_avg_sq + (1 - beta2) * grad^2`, is known to hold for these."""

FIRST = ("exp_avg", "state1")
SECOND = ("exp_avg_sq", "state2")
"""Names of the two moments in a parameter's state: torch's, and those of bitsandbytes."""

TOLERANCE = 0.1
"""Of what a gradient adds to the second moment. Weight decay in the gradient is within it."""


def is_pair_of_betas(group: dict[str, Any]) -> bool:
    """Whether a parameter group has Adam's two betas, and not the three of some others."""
    betas = group.get("betas")
    return isinstance(betas, tuple | list) and len(betas) == 2


def second_moment(parameter: Tensor, state: dict[str, Any]) -> Tensor | str:
    """The second moment of a parameter, or why there is none that can be corrected."""
    name = next((name for name in SECOND if name in state), None)
    if name is None:
        return f"its state has no second moment, only {', '.join(map(str, state))}"
    moment, parameter = local_shard(state[name]), local_shard(parameter)
    if type(moment) not in (Tensor, torch.nn.Parameter):
        return f"its {name} is a {type(moment).__name__}, not a plain tensor"
    if not moment.is_floating_point():
        return f"its {name} is quantised ({moment.dtype})"
    if moment.shape != parameter.shape:
        return f"its {name} has the shape {tuple(moment.shape)}, not {tuple(parameter.shape)}"
    return moment


def beta2s(optimizer: Any) -> dict[int, float]:
    """Beta2 by the id of a parameter."""
    found = {}
    for group in optimizer.param_groups:
        beta = float(group["betas"][1])  # once per group: of a tensor it waits for the device
        found |= dict.fromkeys(map(id, group["params"]), beta)
    return found


def scaling(optimizer: Any, device: torch.device) -> tuple[float | Tensor, Tensor | None]:
    """By what a fused optimizer divides gradients itself, and its scaler's `found_inf`."""
    scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    return (
        1.0 if scale is None else scale.to(device, non_blocking=True),
        None if found_inf is None else found_inf.to(device, non_blocking=True),
    )


class RuleCheck:
    """Whether a step changes second moments by Adam's rule.

    Not every `exp_avg_sq` does: Prodigy scales it, SOAP keeps it in another basis.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._moments: list[tuple[Tensor, Tensor]] = []  # as they are, and as they should become
        self._sums: list[Tensor] = []  # what gradients add; what rounding may change

    def add(self, moment: Tensor, grad: Tensor, beta: float) -> None:
        """Note what the step should make of a moment. Called before it."""
        scale, found_inf = scaling(self._optimizer, grad.device)
        added = (1 - beta) * (grad.detach().float() / scale).square()
        if found_inf is not None:
            added = added * (found_inf == 0)
        slack = torch.finfo(moment.dtype).eps * moment.float().sum()
        self._moments.append((moment, beta * moment.float() + added))
        self._sums.append(torch.stack([added.sum(), slack]).double())

    def holds(self) -> bool | None:
        """After the step. None if there was nothing to tell it by."""
        if not self._moments:
            return None
        # `to`: a model may be on several devices
        home = self._sums[0].device
        errors = [(moment - then).abs().sum().double() for moment, then in self._moments]
        error = torch.stack([each.to(home) for each in errors]).sum()
        sums = torch.stack([each.to(home) for each in self._sums]).sum(0)
        wrong, added, slack = torch.cat([error.unsqueeze(0), sums]).tolist()
        if not (added > 0 and wrong < float("inf")):  # a NaN too
            return None
        return wrong <= TOLERANCE * added + slack


# Hooks around an optimizer's step, shared by all handles that are attached to that optimizer.
#
# What a handle changes for the time of a step (second moments, beta1) is changed after the user's
# own pre-hooks and put right before the user's own post-hooks, so nobody sees or saves it.


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


log = logging.getLogger("oktopk")

# A sum of `age` gradients g has the square age^2 g^2 if they all point in one direction, age g^2 if
# they are noise. One sum does not tell which; this is half-way.
EXPONENT = 1.5
NEVER = -2  # steps; a first step has -1 before it

Last = Callable[[], StepStats | None]
"""The step that was exchanged last."""


class Moment(NamedTuple):
    """A second moment that the step to come will change."""

    grad: Tensor
    square: Tensor
    peak: Tensor | None
    """AMSGrad's maximum of it."""

    arrived: Tensor
    beta: float


class StalenessCorrection:
    """Corrects Adam's moments around `optimizer.step()`; outside of it they are the user's.

    Of an optimizer that is sharded over the ranks, each rank corrects the moments of its own shard,
    but every rank knows when the entries of every parameter last arrived.
    """

    def __init__(
        self,
        optimizer: Any,
        parameters: dict[str, Tensor],
        settings: Settings,
        last: Last,
        *,
        logs: bool = True,
    ) -> None:
        """`parameters` are those that travel sparse, by name: the others never arrive late.

        `logs` is whether this rank logs for all of them.
        """
        self._optimizer = optimizer
        self._local = local_optimizer(optimizer)
        self._parameters = parameters
        self._settings = settings
        self._last = last
        self._logs = logs
        self._arrived: dict[str, Tensor] = {}
        # whether Adam's rule holds; what is not torch's own must show it in its first sparse step
        self._trusted: bool | None = True if type(self._local) in KNOWN else None
        self._check: RuleCheck | None = None
        # moments, whether places count as stored, places, what they were and what they will be
        self._due: list[tuple[Tensor, bool, Tensor, Tensor, Tensor]] = []
        self._hooks: StepHooks | None = None
        if settings.staleness_correction or settings.max_beta1 is not None:
            _refuse_others(self._local)
            self._hooks = StepHooks.join(self._local, self)

    def close(self) -> None:
        """Leave the optimizer alone from now on."""
        if self._hooks is not None:
            self._hooks.leave(self._local, self)
            self._hooks = None

    def state_dict(self) -> dict[str, Tensor]:
        """By parameter: the step in which an entry last arrived, the same on every rank.

        int32; NEVER where the sparse phase has not begun.
        """
        if not self._settings.staleness_correction:
            return {}
        return {
            name: self._arrived[name].clone()
            if name in self._arrived
            else torch.full_like(local_shard(p), NEVER, dtype=torch.int32)
            for name, p in self._parameters.items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._arrived = {}
        for name, steps in state.items():
            if name not in self._parameters or (steps == NEVER).all():
                continue
            parameter = local_shard(self._parameters[name])
            if steps.shape != parameter.shape:
                shapes = f"{tuple(steps.shape)}, and the parameter {tuple(parameter.shape)}"
                raise ValueError(f"the steps in which {name} arrived have the shape {shapes}")
            self._arrived[name] = torch.empty_like(parameter, dtype=torch.int32).copy_(steps)
        # arrivals are forgotten where Adam's rule does not hold, so a state that has some was right
        if self._trusted is not True:
            self._trusted = True if self._arrived else None

    def exchanged(self) -> StepStats | None:
        return self._last()

    def before_step(self) -> dict[int, float]:
        """Correct the second moments; return the limits of beta1 by the id of a parameter."""
        stats = self._last()
        if stats is None or stats.skipped:
            return {}
        if stats.phase == "dense" or stats.k == stats.numel:  # nothing was held back
            return {}
        if self._settings.staleness_correction and self._trusted is not False:
            self._correct_moments(stats.step)
        return self._caps()

    def after_step(self) -> None:
        if self._check is not None:
            self._trusted, self._check = self._check.holds(), None
            if self._trusted is False:
                self._give_up("its second moment does not follow Adam's rule")
        for square, as_stored, where, _, value in self._due:
            set_at(square, as_stored, where, value)
        self._due = []

    def undo(self) -> None:
        for square, as_stored, where, was, _ in self._due:
            set_at(square, as_stored, where, was)
        self._due, self._check = [], None

    def _caps(self) -> dict[int, float]:
        """The limit of beta1 for each parameter that has a first moment, or no state yet."""
        most = self._settings.max_beta1
        if most is None:
            return {}
        states = [(p, self._local.state.get(p)) for p in self._parameters.values()]
        return {id(p): most for p, state in states if not state or any(n in state for n in FIRST)}

    def _correct_moments(self, step: int) -> None:
        """Correct the second moments for what arrives now. One read of n, then O(k)."""
        betas, late = beta2s(self._local), []
        owned = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        for name, parameter in self._parameters.items():
            if parameter.grad is None or id(parameter) not in owned:
                continue
            grad, state = local_shard(parameter.grad.detach()), self._local.state.get(parameter)
            square = second_moment(parameter, state) if state else None
            if isinstance(square, str):
                self._give_up(f"of {name}, {square}")
                return
            if name not in self._arrived:  # until now everything arrived at every step
                self._arrived[name] = torch.full_like(grad, step - 1, dtype=torch.int32)
            arrived = self._arrived[name]
            if state and square is not None:
                peak = local_shard(state.get("max_exp_avg_sq"))
                late.append(Moment(grad, square, peak, arrived, betas[id(parameter)]))
            if square is None or not self._trusted:  # no state yet, or on another rank
                _, found_inf = scaling(self._local, grad.device)
                arrived.masked_fill_(arrival_mask(grad, found_inf), step)
        if self._trusted:
            for device in {moment.grad.device for moment in late}:
                self._correct([moment for moment in late if moment.grad.device == device], step)
        else:
            self._check = RuleCheck(self._local)
            for moment in late:
                self._check.add(moment.square, moment.grad, moment.beta)

    def _correct(self, moments: list[Moment], step: int) -> None:
        """Lower the second moments of late entries now, and record what to set after the step."""
        device = moments[0].grad.device
        orders = [stored_alike(*(x for x in m if isinstance(x, Tensor))) for m in moments]
        late = [
            kernels.SecondMoment(
                grad=flattened(m.grad, as_stored),
                exp_avg_sq=flattened(m.square, as_stored),
                last_arrival=flattened(m.arrived, as_stored),
                shares=shares(m.beta, step + 2, device),
                beta2=m.beta,
            )
            for m, as_stored in zip(moments, orders, strict=True)
        ]
        found = kernels.correct_second_moments_(late, step, *scaling(self._local, device))
        for m, flat, as_stored, (where, was, after) in zip(
            moments, late, orders, found, strict=True
        ):
            put_back(m.arrived, flat.last_arrival)
            put_back(m.square, flat.exp_avg_sq)
            self._due.append((m.square, as_stored, where, was, after))
            if m.peak is not None:  # the step itself may see more than was meant
                most = flattened(m.peak, as_stored)[where]
                self._due.append((m.peak, as_stored, where, most, most.maximum(after)))

    def _give_up(self, why: str) -> None:
        """Stop correcting: this optimizer's moments are not what they seemed."""
        self._trusted, self._arrived = False, {}
        if self._logs:
            log.warning(
                "%s: its second moments cannot be corrected (%s): plain error feedback from now on",
                type(self._local).__name__,
                why,
            )


@lru_cache(maxsize=16)
def _table(beta: float, length: int, device: torch.device) -> Tensor:
    age = torch.arange(length, dtype=torch.float64)
    return ((1 - beta**age) / age.clamp(min=1) ** EXPONENT).float().to(device)


def shares(beta: float, most: int, device: torch.device) -> Tensor:
    """By age up to `most`: the share of a sum's square that Adam's second moment is to take in.

    `(1 - beta^age) / age^1.5` is what as many gradients as there were come to, each as large as
    half-way between all signal and all noise; at age 1 that is what Adam takes in. The moment is
    lowered before the step for that, but not below 0: a sum that is all signal meets that limit
    from an age of about 30 on, and its own step then sees more than was meant (2.8 times on average
    in a small net at beta2 0.999); the steps after it see what was meant.
    """
    return _table(beta, 1 << most.bit_length(), device)


def _refuse_others(optimizer: Any) -> None:
    known = hasattr(optimizer, "register_step_pre_hook")
    if not known or any("betas" not in group for group in optimizer.param_groups):
        raise TypeError(
            "staleness_correction and max_beta1 are for Adam and optimizers with its betas, given "
            f"as attach(..., optimizer=...); this is {type(optimizer).__name__}"
        )


# Whether an optimizer has stepped before, by its state.


def steps_taken(optimizer: Any) -> int | None:
    """The number of steps that an optimizer has taken: 0 for a new one, None for some number.

    Not every optimizer counts its steps, and SGD without momentum has no state to tell them by: it
    looks new. A state of zeros looks new too: `torch.distributed.checkpoint` makes one to load
    into. Shards of DTensors are read as they are, since the other ranks do not take part.
    """
    states = [
        state
        for state in local_optimizer(optimizer).state.values()
        if any(map(_moved, state.items()))
    ]
    counts = [int(local_shard(state["step"])) for state in states if "step" in state]
    if not states:
        return 0
    return max(counts) if counts else None


def _moved(entry: tuple[Any, Any]) -> bool:
    """Whether an entry of a parameter's state has left zero; the count of steps does not tell."""
    name, value = entry
    return name != "step" and isinstance(value, Tensor) and bool(local_shard(value).any())
