# SPDX-License-Identifier: Apache-2.0
"""`ResidualScaling`: the residual is rescaled when the learning rate or the loss scale changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from oktopk.exchange.saved_state import SavedRates

LOWEST = 0.1  # of the highest rate: the lowest that residuals follow


class ResidualScaling:
    """The learning rates and the loss scale of the last step, and the factors when they change.

    A gradient that entered the residual under learning rate a and is applied under rate b must
    weigh a/b as much to move the weights as far as it would have. That is exact for plain SGD.
    Momentum carries some of it to later, larger rates, so rates below a tenth of the highest one
    are treated as that tenth. A gradient that entered under loss scale a and is unscaled by b must
    be b/a as large.
    """

    def __init__(
        self,
        optimizer: Optimizer | LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.optimizer: Any = None
        if optimizer is not None:
            self.bind(optimizer)
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise TypeError(f"expected a GradScaler as scaler, got {type(scaler).__name__}")
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._rates: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._scale: float | None = None

    def bind(self, optimizer: Optimizer | LRScheduler) -> None:
        """Follow the learning rates of an optimizer, or of that of a scheduler."""
        inner = innermost_optimizer(optimizer)
        if not hasattr(inner, "param_groups"):
            raise TypeError(f"expected an optimizer or a scheduler, got {type(optimizer).__name__}")
        self.optimizer = inner

    @property
    def has_scaler(self) -> bool:
        """Whether there is a loss scale to follow; a disabled scaler has none."""
        return self._scaler is not None

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1 without one."""
        return self._scaler.get_scale() if self._scaler else 1.0

    def lr_factors(self, parameters: dict[str, Tensor]) -> dict[str, float]:
        """By parameter, the factor for its residual; empty when no learning rate changed."""
        present = self._present_rates(parameters)
        for name, rate in present.items():
            self._peaks[name] = max(rate, self._peaks.get(name, 0.0))
        # a rate of zero applies nothing: the residual stays at the scale of the last rate that did
        rates = {
            name: max(rate, LOWEST * self._peaks[name])
            for name, rate in present.items()
            if rate > 0
        }
        factors = {
            name: self._rates[name] / rate
            for name, rate in rates.items()
            if self._rates.get(name, rate) != rate
        }
        self._rates |= rates
        return factors

    def loss_scale_factor(self) -> float:
        """The factor by which gradients grew with the loss scale; 1 when it did not change."""
        before, self._scale = self._scale, self._scaler.get_scale() if self._scaler else None
        return self._scale / before if self._scale and before else 1.0

    def save(self) -> SavedRates:
        """What a resumed run needs."""
        return SavedRates(rates=dict(self._rates), peaks=dict(self._peaks), scale=self._scale)

    def load(self, saved: SavedRates) -> None:
        """Continue from what `save` returned."""
        self._rates, self._peaks = dict(saved.rates), dict(saved.peaks)
        self._scale = saved.scale

    def _present_rates(self, parameters: dict[str, Tensor]) -> dict[str, float]:
        if self.optimizer is None:
            return {}
        by_id = {}
        for group in self.optimizer.param_groups:
            rate = float(group["lr"])  # once per group: of a tensor it waits for the device
            by_id |= dict.fromkeys(map(id, group["params"]), rate)
        return {name: by_id[id(p)] for name, p in parameters.items() if id(p) in by_id}


def innermost_optimizer(optimizer: Any) -> Any:
    """The optimizer of a scheduler, or of what Accelerate wraps around either."""
    for _ in range(4):
        inner = getattr(optimizer, "optimizer", getattr(optimizer, "scheduler", None))
        if inner is None:
            break
        optimizer = inner
    return optimizer


def local_optimizer(optimizer: Any) -> Any:
    """The optimizer that has the state of this rank's parameters.

    That is the optimizer itself, unless it shards another one over the ranks, as
    `ZeroRedundancyOptimizer` does with what it has as `optim`.
    """
    inner = getattr(optimizer, "optim", None)
    return inner if hasattr(inner, "param_groups") and hasattr(inner, "state") else optimizer
