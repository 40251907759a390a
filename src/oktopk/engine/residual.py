"""Error feedback: moves four and five. What was not applied stays with the rank that had it."""

from __future__ import annotations

from torch import Tensor

from oktopk import kernels
from oktopk.methods import Exchanged


def settle_(
    grad: Tensor,
    residual: Tensor | None,
    exchanged: Exchanged,
    size: int,
    advance: float = 0.0,
) -> None:
    """`grad` becomes the average; `residual`, which holds acc, becomes what is still owed.

    What this rank offered leaves the residual where the result has it, as it arrived. The sum over
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
    base = exchanged.base
    kernels.settle_(grad, residual, result, exchanged.offered, size, 1 + advance, base)
    for sums in exchanged.returned:  # one by one: indices are unique within each
        kernels.add_at_(residual, sums, 1 + advance, base)
