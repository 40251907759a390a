"""Adam's second moment for sums that come late, in numba: a walk over what arrived."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels import reference
from oktopk.kernels.selecting import select
from oktopk.kernels.vector import compiled


@compiled
def _take_late(
    indices, values, square, arrived, step, shares, beta, rest, scale, where, was, after
):
    count = 0
    for i in range(indices.size):
        at = np.intp(indices[i])
        age = step - arrived[at]
        arrived[at] = step
        if age > 1:
            total = values[i] / scale
            energy = total * total
            then = beta * square[at] + energy * shares[min(age, shares.size - 1)]
            where[count] = at
            was[count] = square[at]
            after[count] = then
            before = (then - rest * energy) / beta
            square[at] = before if before >= 0 or before != before else np.float32(0)
            count += 1
    return count


def take_late(
    grad: Tensor,
    square: Tensor,
    arrived: Tensor,
    step: int,
    shares: Tensor,
    beta: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if grad.dtype != torch.float32 or square.dtype != torch.float32:
        return reference.take_late(grad, square, arrived, step, shares, beta, scale)
    found, num = select(grad, reference.least(grad.dtype), grad.numel())
    assert found.indices is not None
    where, was, after = (torch.empty(num, dtype=t) for t in (torch.int64, *[torch.float32] * 2))
    numbers = np.float32(beta), np.float32(1 - beta), np.float32(scale)
    late = _take_late(
        found.indices.numpy(),
        found.values.numpy(),
        square.detach().numpy(),
        arrived.numpy(),
        step,
        shares.numpy(),
        *numbers,
        where.numpy(),
        was.numpy(),
        after.numpy(),
    )
    return where[:late], was[:late], after[:late]
