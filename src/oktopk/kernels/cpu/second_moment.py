# SPDX-License-Identifier: Apache-2.0
"""The correction of Adam's second moment in numba: a walk over the entries that arrived."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels import reference
from oktopk.kernels.backend import Correction, SecondMoment
from oktopk.kernels.cpu.selection import select
from oktopk.kernels.cpu.vector import compiled


@compiled
def _correct(
    indices,
    values,
    exp_avg_sq,
    last_arrival,
    step,
    shares,
    beta2,
    one_minus_beta2,
    scale,
    positions,
    before,
    after,
):
    count = 0
    for i in range(indices.size):
        at = np.intp(indices[i])
        age = step - last_arrival[at]
        last_arrival[at] = step
        if age > 1:
            total = values[i] / scale
            square = total * total
            then = beta2 * exp_avg_sq[at] + square * shares[min(age, shares.size - 1)]
            positions[count] = at
            before[count] = exp_avg_sq[at]
            after[count] = then
            lowered = (then - one_minus_beta2 * square) / beta2
            # not below 0, but a NaN stays one
            exp_avg_sq[at] = lowered if lowered >= 0 or lowered != lowered else np.float32(0)
            count += 1
    return count


def correct_second_moments_(
    moments: list[SecondMoment], step: int, scale: float | Tensor, found_inf: Tensor | None
) -> list[Correction]:
    is_skipped, corrections = found_inf is not None and bool(found_inf), []
    for moment in moments:
        if moment.grad.dtype == moment.exp_avg_sq.dtype == torch.float32:
            corrections.append(_corrected(moment, step, float(scale), is_skipped))
        else:
            corrections += reference.correct_second_moments_([moment], step, scale, found_inf)
    return corrections


def _corrected(moment: SecondMoment, step: int, scale: float, is_skipped: bool) -> Correction:
    grad = moment.grad[:0] if is_skipped else moment.grad
    found, num = select(grad, reference.smallest_arrival(grad.dtype), grad.numel())
    positions = torch.empty(num, dtype=torch.int64)
    before, after = (torch.empty(num, dtype=torch.float32) for _ in range(2))
    numbers = np.float32(moment.beta2), np.float32(1 - moment.beta2), np.float32(scale)
    count = _correct(
        found.indices.numpy(),
        found.values.numpy(),
        moment.exp_avg_sq.detach().numpy(),
        moment.last_arrival.numpy(),
        step,
        moment.shares.numpy(),
        *numbers,
        positions.numpy(),
        before.numpy(),
        after.numpy(),
    )
    return Correction(positions[:count], before[:count], after[:count])
