# SPDX-License-Identifier: Apache-2.0
"""Tensors of one shape as flat ones, in the order of memory where they have it in common."""

from __future__ import annotations

import sys
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, Tensor | None)
CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


def is_dtensor(x: object) -> bool:
    """Whether it is a DTensor. torch's module of them takes half a second to import: where nobody
    else has, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_shard(x: T) -> T:
    """This rank's shard of a DTensor, sharing its memory; any other tensor, or None, as it is."""
    return x._local_tensor.detach() if is_dtensor(x) else x  # pyright: ignore


def stored_alike(*tensors: Tensor) -> bool:
    """Whether they lie in memory in one and the same order, without gaps."""
    first, orders = tensors[0], (torch.contiguous_format, *CHANNELS_LAST)
    whole = any(first.is_contiguous(memory_format=order) for order in orders)
    return whole and all(other.stride() == first.stride() for other in tensors)


def flattened(x: Tensor, as_stored: bool) -> Tensor:
    """A view in the order of memory, or the values in the order of indices, which may be a copy."""
    x = x.detach()
    return x.as_strided((x.numel(),), (1,)) if as_stored else x.contiguous().view(-1)


def put_back(x: Tensor, flat: Tensor) -> None:
    """Take over what was changed, if it was changed in a copy."""
    if flat.data_ptr() != x.data_ptr():
        x.copy_(flat.view_as(x))


def set_at(x: Tensor, as_stored: bool, where: Tensor, values: Tensor) -> None:
    flat = flattened(x, as_stored)
    flat[where] = values
    put_back(x, flat)
