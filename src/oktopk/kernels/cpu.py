"""The kernels in numba, one core each, without the GIL."""

# pyright: reportCallIssue=false
# (numba hands an intrinsic its first argument itself)

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels.counting import all_finite as all_finite
from oktopk.kernels.counting import count_reaching as count_reaching
from oktopk.kernels.counting import kth_magnitude as kth_magnitude
from oktopk.kernels.counting import least_magnitude as least_magnitude
from oktopk.kernels.counting import trim as trim
from oktopk.kernels.packing import decode_indices as decode_indices
from oktopk.kernels.packing import encode_indices as encode_indices
from oktopk.kernels.selecting import accumulate_select as accumulate_select
from oktopk.kernels.selecting import select as select
from oktopk.kernels.staleness import take_late as take_late
from oktopk.kernels.vector import compiled, lowest_bit, prefetch
from oktopk.sparse import Sparse

AT_ONCE = True  # there is no device to wait for
SOON = 24  # entries from now
PAGE = 1024  # values zeroed at once, and then in the first cache when results are written
BLOCK = 2**15  # sums taken together: they fit the second cache


@compiled
def _merge(indices, values, starts, ends, lo, width, sums, touched, out_indices, out_values):
    """Sum the parts block by block, so that the sums stay in the cache; part by part in a block.

    `sums` and `touched` have a block of zeros, and are left so. `starts` is moved.
    """
    count = 0
    for block in range(0, width, BLOCK):
        base, limit = lo + block, lo + min(block + BLOCK, width)
        for part in range(starts.size):
            i = starts[part]
            while i < ends[part] and indices[i] < limit:
                at = np.intp(indices[i]) - base
                sums[at] += values[i]
                touched[at >> 5] |= np.uint32(1) << np.uint32(at & 31)
                i += 1
            starts[part] = i
        for word in range((limit - base + 31) >> 5):
            hits = touched[word]
            touched[word] = 0
            while hits:
                at = word * 32 + np.intp(lowest_bit(hits))
                out_indices[count] = at + base
                out_values[count] = sums[at]
                sums[at] = 0
                hits &= hits - np.uint32(1)
                count += 1
    return count


@compiled
def _settle(grad, residual, result, sums, indices, values, factor, divisor, base):
    """Zeros and results in one walk, so that a cache line of grad is written once."""
    zeroed = i = 0
    for j in range(result.size):
        if j + SOON < result.size:
            prefetch(residual, np.intp(result[j + SOON]) - base)
        at = np.intp(result[j]) - base
        if at >= zeroed:
            end = min((at // PAGE + 1) * PAGE, grad.size)
            grad[zeroed:end] = 0
            zeroed = end
        grad[at] = sums[j] * factor / divisor
        while i < indices.size and indices[i] < result[j]:
            i += 1
        if i < indices.size and indices[i] == result[j]:
            residual[at] -= values[i] * factor
    grad[zeroed:] = 0


@compiled
def _take_common(residual, result, indices, values, factor, base):
    """Take `values` off at the indices both lists have; both ascend, so one walk finds them."""
    i = 0
    for j in range(result.size):
        while i < indices.size and indices[i] < result[j]:
            i += 1
        if i < indices.size and indices[i] == result[j]:
            residual[result[j] - base] -= values[i] * factor


@compiled
def _add_at(x, indices, values, factor, base):
    for i in range(indices.size):
        if i + SOON < indices.size:
            prefetch(x, np.intp(indices[i + SOON]) - base)
        x[indices[i] - base] += values[i] * factor


def take(x: Tensor, threshold: float, num: int) -> Sparse:
    return select(x, threshold, num)[0]


def merge(indices: Tensor, values: Tensor, splits: list[int], lo: int, hi: int) -> Sparse:
    at_most = min(indices.numel(), hi - lo)
    out_indices = torch.empty(at_most, dtype=torch.int32)
    out_values = torch.empty(at_most, dtype=values.dtype)
    ends = np.cumsum(splits)
    num = _merge(
        indices.numpy(),
        values.numpy(),
        ends - splits,
        ends,
        lo,
        hi - lo,
        np.zeros(BLOCK, values.numpy().dtype),
        np.zeros(BLOCK // 32, np.uint32),
        out_indices.numpy(),
        out_values.numpy(),
    )
    return Sparse(out_indices[:num], out_values[:num], hi)


def settle_(
    grad: Tensor,
    residual: Tensor,
    result: Sparse,
    offered: Sparse,
    divisor: int,
    factor: float,
    base: int = 0,
) -> None:
    number = result.values.numpy().dtype.type
    where, ours = result.indices.numpy(), (offered.indices.numpy(), offered.values.numpy())
    if grad.dtype == result.values.dtype:
        lists = where, result.values.numpy(), *ours
        numbers = number(factor), number(divisor)
        _settle(grad.numpy(), residual.numpy(), *lists, *numbers, base)
    else:
        grad.zero_()
        grad[result.indices.long() - base] = (result.values * factor / divisor).to(grad.dtype)
        _take_common(residual.numpy(), where, *ours, number(factor), base)


def add_at_(x: Tensor, sparse: Sparse, factor: float, base: int = 0) -> None:
    values = sparse.values.numpy()
    _add_at(x.numpy(), sparse.indices.numpy(), values, values.dtype.type(factor), base)
