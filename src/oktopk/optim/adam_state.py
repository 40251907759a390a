# SPDX-License-Identifier: Apache-2.0
"""The second moment in an optimizer's state: where it is, and whether Adam's rule updates it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, NAdam, RAdam

from oktopk.optim.flat_views import local_shard

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
