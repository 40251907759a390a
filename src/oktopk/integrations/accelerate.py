# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Accelerate: one line after `accelerator.prepare`."""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn

from oktopk.adapters.ddp import AttachOptions
from oktopk.adapters.ddp_handle import Handle
from oktopk.integrations import Unattached, attach_wrapped, load_if_saved
from oktopk.utils.extras import require

require("oktopk.integrations.accelerate", "accelerate")

from accelerate import Accelerator  # noqa: E402 - only when it is there


def attach(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, **options: Unpack[AttachOptions]
) -> Handle | Unattached:
    """Compress the gradient exchange of a prepared model. Every process must call it.

    `accelerator.save_state` and `load_state` then save and load the states of all ranks, each in a
    file of its own in the folder of the checkpoint. With fp16, the accelerator's scaler is used.

    Args:
        accelerator: the one that prepared the model.
        model: what `accelerator.prepare` returned for the model.
        optimizer: what it returned for the optimizer, or a scheduler.
        options: those of `oktopk.attach`.

    Returns:
        The handle, or an `Unattached` where one process trains alone.
    """
    handle = attach_wrapped(model, optimizer, accelerator.scaler, **options)

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        handle.save(folder)

    def load(models: list[nn.Module], folder: str) -> None:
        load_if_saved(handle, folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return handle
