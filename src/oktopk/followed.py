"""What a residual must follow: the learning rate it was saved up under, and the loss scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from oktopk.engine import Engine


class Followed:
    """The rates and the scale of the last step; residuals are corrected when they change.

    A gradient that was kept back under rate a and is applied under rate b must weigh a/b as much to
    move the weights as it would have. One that was kept back under loss scale a and is unscaled by
    b must be b/a as large.
    """

    def __init__(
        self,
        optimizer: Optimizer | LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._optimizer: Any = getattr(optimizer, "optimizer", optimizer)  # a scheduler has its own
        if self._optimizer is not None and not hasattr(self._optimizer, "param_groups"):
            raise TypeError(f"expected an optimizer or a scheduler, got {type(optimizer).__name__}")
        self._scaler = scaler
        self._rates: dict[str, float] = {}
        self._scale: float | None = None

    def correct(
        self, engine: Engine, layout: list[list[str]], parameters: dict[str, Tensor]
    ) -> None:
        """Bring the residuals to the present rates and scale. O(1) when nothing changed."""
        rates = self._present_rates(parameters)
        scale = self._scaler.get_scale() if self._scaler is not None else None
        factors = {
            name: self._rates[name] / rate
            for name, rate in rates.items()
            if rate > 0 and self._rates.get(name, rate) != rate
        }
        if scale and self._scale and scale != self._scale:
            engine.rescale(scale / self._scale)
        if engine.residual is not None and factors:
            for bucket, names in enumerate(layout):
                sizes = [parameters[name].numel() for name in names]
                residual = engine.residual_of(bucket)
                assert residual is not None
                for name, part in zip(names, residual.split(sizes), strict=True):
                    part.mul_(factors.get(name, 1.0))
        # a rate of zero applies nothing: what is owed stays owed at the last rate that did
        self._rates |= {name: rate for name, rate in rates.items() if rate > 0}
        self._scale = scale

    def state_dict(self) -> dict[str, Any]:
        return {"rates": dict(self._rates), "scale": self._scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rates, self._scale = dict(state["rates"]), state["scale"]

    def _present_rates(self, parameters: dict[str, Tensor]) -> dict[str, float]:
        if self._optimizer is None:
            return {}
        by_id = {
            id(parameter): float(group["lr"])
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        return {name: by_id[id(p)] for name, p in parameters.items() if id(p) in by_id}
