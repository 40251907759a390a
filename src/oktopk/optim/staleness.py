# SPDX-License-Identifier: Apache-2.0
"""`StalenessCorrection`: Adam's moments for gradients that accumulated before they arrived.

An entry that accumulated for `age` steps arrives as one sum S. Adam would add S^2 to its second
moment, though each of the gradients in S was small. That slows the entries that matter down by up
to the square root of their age. Besides, Adam's first moment averages over ten steps what is an
average over many steps already; `Settings.max_beta1` lowers that if the user asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.kernels.reference import arrival_mask
from oktopk.optim.adam_state import (
    FIRST,
    KNOWN,
    RuleCheck,
    beta2s,
    scaling,
    second_moment,
)
from oktopk.optim.flat_views import (
    flattened,
    local_shard,
    put_back,
    set_at,
    stored_alike,
)
from oktopk.optim.residual_scaling import local_optimizer
from oktopk.optim.step_hooks import StepHooks
from oktopk.settings import Settings
from oktopk.stats import StepStats

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
