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
    late: list[reference.Late], step: int, scale: float | Tensor, found_inf: Tensor | None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    skips, done = found_inf is not None and bool(found_inf), []
    for each in late:
        if each.grad.dtype == each.square.dtype == torch.float32:
            done.append(_walk(each, step, float(scale), skips))
        else:
            done += reference.take_late([each], step, scale, found_inf)
    return done


def _walk(
    late: reference.Late, step: int, scale: float, skips: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad = late.grad[:0] if skips else late.grad
    found, num = select(grad, reference.least(grad.dtype), grad.numel())
    where, was, after = (torch.empty(num, dtype=t) for t in (torch.int64, *[torch.float32] * 2))
    numbers = np.float32(late.beta), np.float32(1 - late.beta), np.float32(scale)
    count = _take_late(
        found.indices.numpy(),
        found.values.numpy(),
        late.square.detach().numpy(),
        late.arrived.numpy(),
        step,
        late.shares.numpy(),
        *numbers,
        where.numpy(),
        was.numpy(),
        after.numpy(),
    )
    return where[:count], was[:count], after[:count]
