"""What Adam must know of gradients that come late and large.

An entry that was saved up for `age` steps arrives as one sum S. Adam would add S^2 to its second
moment, though the gradients it stands for were small: that slows the entries that matter down by up
to the root of their age. And Adam's first moment would average over ten steps what is an average
over many steps already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oktopk.settings import Settings
from oktopk.stats import StepStats

# A sum of `age` gradients g has the square age^2 g^2 if they all point one way, age g^2 if they are
# noise. Nobody can tell from one sum; this is half-way.
EXPONENT = 1.5
NEVER = -1  # steps

Last = Callable[[], StepStats | None]
"""The step that was exchanged last."""


class LateMoments:
    """Hooks around the optimizer's step. Outside of it the optimizer is as the user made it."""

    def __init__(
        self, optimizer: Any, parameters: dict[str, Tensor], settings: Settings, last: Last
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._settings = settings
        self._last = last
        self._arrived: dict[str, Tensor] = {}
        self._betas: list[tuple[dict[str, Any], tuple[float, float]]] = []
        self._hooks: list[Any] = []
        if not (settings.late_moments or settings.beta1 is not None):
            return
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise TypeError(
                "late_moments and beta1 need attach(..., optimizer=...) with a torch optimizer, "
                f"got {type(optimizer).__name__}"
            )
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before()),
            optimizer.register_step_post_hook(lambda *_: self._restore()),
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
        self._arrived = {
            name: steps.to(self._parameters[name].device, copy=True)
            for name, steps in state.items()
            if not (steps == NEVER).all()
        }

    def _before(self) -> None:
        self._restore()  # after a step that raised
        stats = self._last()
        if stats is None or not _is_late(stats):
            return
        if self._settings.late_moments:
            self._take_in(stats.step)
        # while the density still falls little is late, and a run's first steps need the average
        settled = self._settings.density_at(stats.step) == self._settings.density
        if self._settings.beta1 is not None and settled:
            self._relieve(self._settings.beta1)

    def _take_in(self, step: int) -> None:
        """Correct the second moments for what arrives now. One read of n, then O(k)."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                square = self._optimizer.state.get(parameter, {}).get("exp_avg_sq")
                if square is not None and parameter.grad is not None:
                    self._correct_(parameter, square, group["betas"][1], step)

    def _correct_(self, parameter: Tensor, square: Tensor, beta: float, step: int) -> None:
        name = self._names.get(id(parameter))
        if name is None:
            return
        grad = parameter.grad
        assert grad is not None
        if name not in self._arrived:  # until now everything arrived at every step
            self._arrived[name] = torch.full_like(grad, step - 1, dtype=torch.int32)
        parts = grad, square, self._arrived[name]
        if all(part.is_contiguous() for part in parts):  # one index is cheaper than several
            parts = tuple(part.view(-1) for part in parts)
        grad, square, arrived = parts
        where = grad.nonzero(as_tuple=True)
        age = (step - arrived[where]).to(square.dtype)
        arrived[where] = step
        square[where] += taken_in(grad[where].to(square.dtype), age, beta)

    def _relieve(self, most: float) -> None:
        for group in self._optimizer.param_groups:
            if group["betas"][0] > most:
                self._betas.append((group, group["betas"]))
                group["betas"] = (most, *group["betas"][1:])

    def _restore(self) -> None:
        while self._betas:
            group, betas = self._betas.pop()
            group["betas"] = betas


def taken_in(total: Tensor, age: Tensor, beta: float) -> Tensor:
    """What to add to v before Adam's `v = beta v + (1 - beta) total^2`, elementwise.

    Then v becomes `beta v + (1 - beta^age) total^2 / age^1.5`: the gradients of `age` steps, each
    as large as half-way between all signal and all noise. 0 where the age is 1.
    """
    seen = (1 - beta**age) / age**EXPONENT
    return torch.where(age > 1, total.square() * (seen - (1 - beta)) / beta, 0)


def _is_late(stats: StepStats) -> bool:
    """Whether entries of this step may have been held back before."""
    return stats.phase == "sparse" and stats.k < stats.numel
