# SPDX-License-Identifier: Apache-2.0
"""Ray Train: one line after `ray.train.torch.prepare_model`."""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn

from oktopk.adapters.ddp import AttachOptions
from oktopk.adapters.ddp_handle import Handle
from oktopk.integrations import Unattached, attach_wrapped, load_if_saved
from oktopk.utils.extras import require

require("oktopk.integrations.ray", "ray")

import ray.train  # noqa: E402 - only when it is there


def attach(
    model: nn.Module, optimizer: Any, **options: Unpack[AttachOptions]
) -> Handle | Unattached:
    """Compress the gradient exchange of a prepared model. Every worker must call it.

    If Ray has a checkpoint (`ray.train.get_checkpoint`), the states of all ranks are loaded from
    it. To save them, every worker calls `handle.save(folder)` and reports that folder:
    `ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))`. Ray puts the files of
    all workers together.

    Args:
        model: what `ray.train.torch.prepare_model` returned.
        optimizer: the optimizer, or a scheduler of it.
        options: those of `oktopk.attach`.

    Returns:
        The handle, or an `Unattached` where one worker trains alone.
    """
    handle = attach_wrapped(model, optimizer, **options)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            load_if_saved(handle, folder)
    return handle
