# SPDX-License-Identifier: Apache-2.0
"""One line in programs of frameworks that wrap the model themselves.

- `huggingface`: `trainer.add_callback(OktopkCallback(trainer))`, for the Trainer of Hugging Face
- `accelerate`: `handle = attach(accelerator, model, optimizer)` after `accelerator.prepare`
- `lightning`: `Trainer(callbacks=[OktopkCallback()])`, and for Fabric
  `handle = attach_fabric(fabric, model, optimizer)` after `fabric.setup`
- `ray`: `handle = attach(model, optimizer)` after `prepare_model` of Ray Train
- `ignite`: `handle = attach(model, optimizer)` after `auto_model` and `auto_optim`

Each module imports its framework, so import the one you need. All take the options of
`oktopk.attach`. Where one process trains alone there is nothing to exchange: the line stays as it
is, and does nothing.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.ddp import AttachOptions, attach
from oktopk.adapters.ddp_handle import Handle
from oktopk.adapters.saved_states import GatheredState, NoStatesError, StateByRank
from oktopk.utils.console import announce

log = logging.getLogger("oktopk")


class Unattached:
    """What integrations return where one process trains alone: it has no state to save."""

    stats = None
    step = 0
    closed = True

    @property
    def gathered(self) -> GatheredState:
        """An empty state, for frameworks that save what one rank has."""
        return GatheredState(self)

    @property
    def by_rank(self) -> StateByRank:
        """An empty state, for `torch.distributed.checkpoint`."""
        return StateByRank(self, 0, 1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def gathered_state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Ignore the residuals of several ranks, which this process does not exchange."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write nothing."""

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Read nothing."""

    def close(self) -> None:
        """Nothing was opened."""

    def __repr__(self) -> str:
        return "<oktopk: one process, nothing to exchange>"


def attach_wrapped(
    model: Any,
    optimizer: Any,
    scaler: torch.amp.GradScaler | None = None,
    **options: Unpack[AttachOptions],
) -> Handle | Unattached:
    """Attach to a model as a framework has wrapped it, perhaps compiled after that.

    `attach` checks what model and optimizer are: frameworks declare less than they return.
    """
    inner: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    if is_alone and not isinstance(inner, DistributedDataParallel):
        if options.get("verbose", True):
            announce("one process: there is nothing to exchange")
        return Unattached()
    return attach(cast("Any", inner), optimizer=optimizer, scaler=scaler, **options)  # it checks


def load_if_saved(handle: Handle | Unattached, folder: str | os.PathLike[str]) -> None:
    """Load the states of a checkpoint; warn where it has none, since a dense run has written it."""
    if isinstance(handle, Unattached):
        return
    try:
        handle.load(folder)
    except NoStatesError:
        handle.driver.start_is_known = True
        if handle.driver.rank == 0:
            log.warning(
                "%s has no state of oktopk: residuals start at zero, and the warm-up begins again",
                folder,
            )
