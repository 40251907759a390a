# SPDX-License-Identifier: Apache-2.0
"""Lightning: a callback for its `Trainer`, and one line after `fabric.setup`."""

from __future__ import annotations

import logging
import math
from typing import Any, Unpack

from oktopk.adapters.ddp import AttachOptions
from oktopk.adapters.ddp_handle import Handle
from oktopk.integrations import Unattached, attach_wrapped
from oktopk.utils.extras import require

require("oktopk.integrations.lightning", "lightning")

from lightning import Fabric, LightningModule, Trainer  # noqa: E402 - only when it is there
from lightning.pytorch.callbacks import Callback  # noqa: E402

log = logging.getLogger("oktopk")


class OktopkCallback(Callback):
    """Compress the gradient exchange of a Lightning `Trainer` with `strategy="ddp"`.

    `Trainer(strategy="ddp", callbacks=[OktopkCallback()])`

    Lightning's own checkpoints carry the states of all ranks, which are gathered for that: a
    checkpoint takes the memory of all ranks' residuals on each rank. `fit(..., ckpt_path=...)`
    loads them.

    Args:
        options: those of `oktopk.attach`; `total_steps` is the trainer's.
    """

    def __init__(self, **options: Unpack[AttachOptions]) -> None:
        self.handle: Handle | Unattached | None = None
        """Of the last or present `fit`; None before the first."""

        self._options: AttachOptions = options
        self._loaded: dict[str, Any] | None = None
        """A state from a checkpoint: Lightning loads it before the model is wrapped."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the wrapped model, and continue from the state of a checkpoint."""
        if self.handle is not None:
            self.handle.close()
        model = trainer.strategy.model
        assert model is not None, "the strategy has wrapped no model"
        steps = trainer.estimated_stepping_batches
        options: AttachOptions = {
            "total_steps": None if math.isinf(steps) else int(steps),
            **self._options,
        }
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.handle = attach_wrapped(model, _only_optimizer(trainer), scaler, **options)
        if self._loaded:
            self.handle.load_state_dict(self._loaded)
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks. Lightning calls it on every rank, and rank 0 writes it."""
        return {} if self.handle is None else self.handle.gathered_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the model is attached."""
        self._loaded = state_dict


def attach_fabric(
    fabric: Fabric, model: Any, optimizer: Any, **options: Unpack[AttachOptions]
) -> Handle | Unattached:
    """Compress the gradient exchange of a model of Fabric. Every process must call it.

    To save and resume, add `"oktopk": handle.gathered` to the state that `fabric.save` and
    `fabric.load` are given.

    Args:
        fabric: the one that set the model up, with `strategy="ddp"`.
        model: what `fabric.setup` returned for the model.
        optimizer: what it returned for the optimizer.
        options: those of `oktopk.attach`.

    Returns:
        The handle, or an `Unattached` where one process trains alone.
    """
    wrapped = getattr(model, "_forward_module", model)
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    return attach_wrapped(wrapped, optimizer, scaler, **options)


def _only_optimizer(trainer: Trainer) -> Any:
    """The optimizer; None where there are several, since a preset is for all parameters."""
    if len(trainer.optimizers) == 1:
        return trainer.optimizers[0]
    if trainer.is_global_zero:
        log.warning(
            "the module has %d optimizers: plain error feedback for all of their parameters",
            len(trainer.optimizers),
        )
    return None
