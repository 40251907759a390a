"""Error feedback: moves four and five. What was not applied stays with the rank that had it."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.methods import Exchanged
from oktopk.sparse import Sparse


def settle_(
    grad: Tensor,
    residual: Tensor | None,
    local: Sparse,
    exchanged: Exchanged,
    size: int,
    advance: float = 0.0,
) -> None:
    """`grad` becomes the average; `residual`, which holds acc, becomes what is still owed.

    An entry leaves the residual where this rank offered it and the result has it. The sum over
    ranks of acc is the result plus the sum over ranks of residuals, element by element. With an
    `advance` the result is so much larger, and each rank owes the advance on what it offered.
    """
    result = exchanged.result
    if result.indices is None:  # everything was applied: nothing is owed
        grad.copy_(result.values.div_(size))
        if residual is not None:
            residual.zero_()
        return
    assert residual is not None
    if advance:
        result = Sparse(result.indices, result.values * (1 + advance), result.numel)
    kernels.settle_(grad, residual, result, local, size)
    if advance:
        _owe_advance_(residual, local, advance)
    for sums in exchanged.returned:  # one by one: indices are unique within each
        assert sums.indices is not None
        residual.index_add_(0, sums.indices, sums.values, alpha=1 + advance)


def _owe_advance_(residual: Tensor, local: Sparse, advance: float) -> None:
    """Where this rank's entry was delivered, its residual is 0 by now. O(k)."""
    assert local.indices is not None
    left = residual[local.indices]
    residual[local.indices] = torch.where(left == 0, local.values * -advance, left)
