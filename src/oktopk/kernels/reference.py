"""The kernels in plain torch: slow and clear, on any device. The other forms must equal these."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.sparse import Sparse


def all_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def kth_magnitude(x: Tensor, k: int) -> float:
    return x.abs().kthvalue(x.numel() - k + 1).values.item()


def select(x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]:
    # not `>=`: a NaN must be selected, and it is not less than anything
    indices = (x.abs() < threshold).logical_not_().nonzero().squeeze(1)
    count = indices.numel()
    indices = indices[:capacity]
    return Sparse(indices.int(), x[indices], x.numel()), count


def accumulate_(residual: Tensor, grad: Tensor) -> None:
    before = residual.clone()
    residual.add_(grad)
    grad.copy_(before)


def accumulate_select(
    residual: Tensor, grad: Tensor, threshold: float, capacity: int
) -> tuple[Sparse, int]:
    accumulate_(residual, grad)
    return select(residual, threshold, capacity)


def merge(indices: Tensor, values: Tensor, splits: list[int], lo: int, hi: int) -> Sparse:
    sums = values.new_zeros(hi - lo)
    touched = torch.zeros(hi - lo, dtype=torch.bool, device=values.device)
    # part by part: within one the indices are unique, so no addition depends on atomics
    for where, what in zip(indices.split(splits), values.split(splits), strict=True):
        at = where.long() - lo
        sums[at] += what
        touched[at] = True
    where = touched.nonzero().squeeze(1)
    return Sparse((where + lo).int(), sums[where], hi)


def settle_(grad: Tensor, residual: Tensor, result: Sparse, local: Sparse, divisor: int) -> None:
    assert result.indices is not None and local.indices is not None
    # by a tensor: by a number, CUDA multiplies with the reciprocal, which rounds twice
    quotients = result.values / result.values.new_full((), divisor)
    grad.zero_()
    grad[result.indices.long()] = quotients.to(grad.dtype)
    residual[local.indices[torch.isin(local.indices, result.indices)].long()] = 0
