"""What Adam must know of gradients that come late and large.

An entry that was saved up for `age` steps arrives as one sum S. Adam would add S^2 to its second
moment, though the gradients it stands for were small: that slows the entries that matter down by up
to the root of their age. And Adam's first moment would average over ten steps what is an average
over many steps already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.settings import Settings
from oktopk.stats import StepStats

# A sum of `age` gradients g has the square age^2 g^2 if they all point one way, age g^2 if they are
# noise. Nobody can tell from one sum; this is half-way.
EXPONENT = 1.5
NEVER = -2  # steps; a first step has -1 before it
CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)

Last = Callable[[], StepStats | None]
"""The step that was exchanged last."""


class LateMoments:
    """Hooks around the optimizer's step. Outside of it the optimizer is as the user made it."""

    def __init__(
        self, optimizer: Any, parameters: dict[str, Tensor], settings: Settings, last: Last
    ) -> None:
        """`parameters` are those that travel sparse, by name: the others never come late."""
        self._optimizer = optimizer
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._settings = settings
        self._last = last
        self._arrived: dict[str, Tensor] = {}
        self._betas: list[tuple[dict[str, Any], tuple[float, float]]] = []
        # moments, whether places count as stored, places, what they were and what they will be
        self._due: list[tuple[Tensor, bool, Tensor, Tensor, Tensor]] = []
        self._hooks: list[Any] = []
        if settings.late_moments or settings.beta1 is not None:
            _refuse_others(optimizer)
            self._hooks = [
                optimizer.register_step_pre_hook(self._on_step),
                optimizer.register_step_post_hook(lambda *_: self._after()),
            ]

    def close(self) -> None:
        """Leave the optimizer alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._restore()

    def state_dict(self) -> dict[str, Tensor]:
        """By parameter: the step in which an entry last arrived, the same on every rank.

        int32; NEVER where the sparse phase has not begun.
        """
        if not self._settings.late_moments:
            return {}
        return {
            name: self._arrived[name].clone()
            if name in self._arrived
            else torch.full_like(p, NEVER, dtype=torch.int32)
            for name, p in self._parameters.items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._arrived = {}
        for name, steps in state.items():
            parameter = self._parameters.get(name)
            if parameter is None or (steps == NEVER).all():
                continue
            if steps.shape != parameter.shape:
                shapes = f"{tuple(steps.shape)}, and the parameter {tuple(parameter.shape)}"
                raise ValueError(f"the steps in which {name} arrived have the shape {shapes}")
            self._arrived[name] = torch.empty_like(parameter, dtype=torch.int32).copy_(steps)

    def _on_step(self, _: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Before the step; with a closure, after it: only then are the gradients there."""
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            self._before()
            return None

        def computed() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._before()
            return loss

        if "closure" in kwargs:
            return args, kwargs | {"closure": computed}
        return (args[0], computed, *args[2:]), kwargs

    def _before(self) -> None:
        self._restore()  # after a step that raised
        for moment, as_stored, where, was, _ in self._due:
            _set(moment, as_stored, where, was)
        self._due = []
        stats = self._last()
        if stats is None or stats.skipped or _finds_inf(self._optimizer):
            return
        if stats.phase == "dense" or stats.k == stats.numel:  # nothing was held back
            return
        if self._settings.late_moments:
            self._take_in(stats.step)
        if self._settings.beta1 is not None:
            self._relieve(self._settings.beta1)

    def _after(self) -> None:
        self._restore()
        for moment, as_stored, where, _, value in self._due:
            _set(moment, as_stored, where, value)
        self._due = []

    def _take_in(self, step: int) -> None:
        """Correct the second moments for what arrives now. One read of n, then O(k)."""
        scale = getattr(self._optimizer, "grad_scale", None)  # fused optimizers unscale themselves
        scale = 1.0 if scale is None else float(scale)
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                name = self._names.get(id(parameter))
                if "exp_avg_sq" in state and parameter.grad is not None and name is not None:
                    beta = float(group["betas"][1])
                    self._correct_(name, parameter.grad, state, beta, scale, step)

    def _correct_(
        self,
        name: str,
        grad: Tensor,
        state: dict[str, Tensor],
        beta: float,
        scale: float,
        step: int,
    ) -> None:
        """Lower the second moment of what is late now, and set it after the step."""
        if name not in self._arrived:  # until now everything arrived at every step
            self._arrived[name] = torch.full_like(grad, step - 1, dtype=torch.int32)
        arrived = self._arrived[name]
        moments = [state[kind] for kind in ("exp_avg_sq", "max_exp_avg_sq") if kind in state]
        as_stored = _stored_alike(grad, arrived, *moments)
        steps, squares, *peaks = (_flat(x, as_stored) for x in (arrived, *moments))
        share = shares(beta, step + 2, grad.device)
        where, was, after = kernels.take_late(
            _flat(grad, as_stored), squares, steps, step, share, beta, scale
        )
        _put_back(arrived, steps)
        _put_back(moments[0], squares)
        self._due.append((moments[0], as_stored, where, was, after))
        for peak in peaks:  # AMSGrad's: the step itself may see more than was meant
            most = peak[where]
            self._due.append((moments[1], as_stored, where, most, most.maximum(after)))

    def _relieve(self, most: float) -> None:
        for group in self._optimizer.param_groups:
            if group["betas"][0] > most:
                self._betas.append((group, group["betas"]))
                group["betas"] = (most, *group["betas"][1:])

    def _restore(self) -> None:
        while self._betas:
            group, betas = self._betas.pop()
            group["betas"] = betas


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


def _stored_alike(*tensors: Tensor) -> bool:
    """Whether they lie in memory in one and the same order, without gaps."""
    first, orders = tensors[0], (torch.contiguous_format, *CHANNELS_LAST)
    whole = any(first.is_contiguous(memory_format=order) for order in orders)
    return whole and all(other.stride() == first.stride() for other in tensors)


def _flat(x: Tensor, as_stored: bool) -> Tensor:
    """A view in the order of memory, or the values in the order of indices, which may be a copy."""
    x = x.detach()
    return x.as_strided((x.numel(),), (1,)) if as_stored else x.contiguous().view(-1)


def _put_back(x: Tensor, flat: Tensor) -> None:
    """Take over what was changed, if it was changed in a copy."""
    if flat.data_ptr() != x.data_ptr():
        x.copy_(flat.view_as(x))


def _set(x: Tensor, as_stored: bool, where: Tensor, values: Tensor) -> None:
    flat = _flat(x, as_stored)
    flat[where] = values
    _put_back(x, flat)


def _finds_inf(optimizer: Any) -> bool:
    """Whether a fused optimizer is about to skip the step because its scaler found an Inf."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _refuse_others(optimizer: Any) -> None:
    known = hasattr(optimizer, "register_step_pre_hook")
    if not known or any("betas" not in group for group in optimizer.param_groups):
        raise TypeError(
            "late_moments and beta1 are for Adam and its kin, given as attach(..., optimizer=...); "
            f"this is {type(optimizer).__name__}"
        )
