# SPDX-License-Identifier: Apache-2.0
"""Parameters that are trained and not exchanged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from oktopk.adapters.parameters import ParameterLayout
from oktopk.engine.saved_state import clean_name

log = logging.getLogger("oktopk")


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
