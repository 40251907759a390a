# SPDX-License-Identifier: Apache-2.0
"""Clipping of one rank's own gradient, before the exchange."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clip_(grads: list[Tensor], most: float) -> None:
    """Scale this rank's gradient to a norm of at most `most`. A NaN or Inf stays one.

    Two passes. Squares are summed in float64: in fp32 those of finite gradients can overflow, and
    an infinite norm would make every gradient zero.
    """
    norm = math.hypot(
        *(float(torch.linalg.vector_norm(grad, dtype=torch.float64)) for grad in grads)
    )
    scale = min(1.0, most / (norm + 1e-6))
    for grad in grads:
        grad.mul_(scale)
