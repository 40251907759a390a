# SPDX-License-Identifier: Apache-2.0
"""PyTorch Ignite: one line after `ignite.distributed.auto_model` and `auto_optim`."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import nn

from oktopk.adapters.ddp import AttachOptions
from oktopk.adapters.ddp_handle import Handle
from oktopk.integrations import Unattached, attach_wrapped


def attach(
    model: nn.Module,
    optimizer: Any,
    scaler: torch.amp.GradScaler | None = None,
    **options: Unpack[AttachOptions],
) -> Handle | Unattached:
    """Compress the gradient exchange of a model of Ignite. Every process must call it.

    To save and resume, add `"oktopk": handle.gathered` to the `to_save` of Ignite's `Checkpoint`
    and to what `Checkpoint.load_objects` loads.

    Args:
        model: what `ignite.distributed.auto_model` returned.
        optimizer: what `ignite.distributed.auto_optim` returned.
        scaler: that of the training step, with `amp_mode="amp"`.
        options: those of `oktopk.attach`.

    Returns:
        The handle, or an `Unattached` where one process trains alone.
    """
    return attach_wrapped(model, optimizer, scaler, **options)
