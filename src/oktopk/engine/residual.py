# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what was sent and is in the result leaves the residual; the rest stays."""

from __future__ import annotations

from torch import Tensor

from oktopk import kernels
from oktopk.methods.base import DenseSum, SparseSum


def apply_sparse_(
    grad: Tensor, acc: Tensor, sums: SparseSum, size: int, overshoot: float = 0.0
) -> None:
    """Turn `grad` into the average and `acc` into the next residual, in place.

    What this rank sent leaves `acc` where the result has it, as the receivers decoded it. So the
    sum over ranks of `acc` equals the result plus the sum over ranks of the residuals, element by
    element. With an overshoot the result is that much larger, and each rank's residual is reduced
    by the overshoot on what it sent.
    """
    factor = 1 + overshoot
    kernels.apply_result_(grad, acc, sums.result, sums.sent, size, factor, sums.offset)
    for correction in sums.corrections:  # one by one: indices are unique within each
        kernels.add_at_(acc, correction, factor, sums.offset)


def apply_dense_(grad: Tensor, acc: Tensor | None, sums: DenseSum, size: int) -> None:
    """Turn `grad` into the average. Everything was applied, so the next residual is zero."""
    grad.copy_(sums.result.div_(size))
    if acc is not None:
        acc.zero_()
