"""Error feedback: moves four and five. What was not applied stays with the rank that had it."""

from __future__ import annotations

from torch import Tensor

from oktopk import kernels
from oktopk.methods import Exchanged
from oktopk.sparse import Sparse


def settle_(
    grad: Tensor, residual: Tensor | None, local: Sparse, exchanged: Exchanged, size: int
) -> None:
    """`grad` becomes the average; `residual`, which holds acc, becomes what is still owed.

    An entry leaves the residual where this rank offered it and the result has it. The sum over
    ranks of acc is the result plus the sum over ranks of residuals, element by element.
    """
    result = exchanged.result
    if result.indices is None:  # everything was applied: nothing is owed
        grad.copy_(result.values.div_(size))
        if residual is not None:
            residual.zero_()
        return
    assert residual is not None
    kernels.settle_(grad, residual, result, local, size)
    for sums in exchanged.returned:  # one by one: indices are unique within each
        assert sums.indices is not None
        residual.index_add_(0, sums.indices, sums.values)
