# SPDX-License-Identifier: Apache-2.0
"""Sums of sparse vectors, and what is done with the result, in numba."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels import reference
from oktopk.kernels.backend import Correction, SecondMoment
from oktopk.kernels.cpu.selection import compiled, lowest_bit, prefetch, select
from oktopk.sparse import Sparse

# pyright: reportCallIssue=false
# (numba passes an intrinsic its first argument itself)


PREFETCH_DISTANCE = 24  # entries between a prefetch and the write that needs it
APPLY_BLOCK = 1024  # averages and residuals written together: they fit the L1 cache
MANY = 1 / 12  # of the entries: from this density on, blocks are faster than a walk
MERGE_BLOCK = 2**15  # sums taken together: they fit the L2 cache


@compiled
def _first_at(indices, limit, start, end):
    """The first position from `start` on whose index is `limit` or more, or `end`.

    Loops over entries look for their end ahead: a loop that also tests every index for the end of
    its block takes twice as long.
    """
    while start < end and indices[start] < limit:
        start += 1
    return start


@compiled
def _merge(indices, values, starts, ends, lo, width, sums, is_set, out_indices, out_values):
    """Sum the parts block by block, so that the sums stay in the cache; count the entries.

    Within a block, parts are added in their order. `is_set` has a bit for each sum of the block.
    `sums` and `is_set` are zeros before and after. `starts` advances to `ends`.
    """
    count = 0
    for block in range(0, width, MERGE_BLOCK):
        base, limit = lo + block, lo + min(block + MERGE_BLOCK, width)
        for part in range(starts.size):
            end = _first_at(indices, limit, starts[part], ends[part])
            for i in range(starts[part], end):
                at = np.uint32(indices[i] - base)
                sums[at] += values[i]
                is_set[at >> np.uint32(5)] |= np.uint32(1) << (at & np.uint32(31))
            starts[part] = end
        for word in range((limit - base + 31) >> 5):
            hits = is_set[word]
            is_set[word] = 0
            while hits:
                at = word * 32 + np.intp(lowest_bit(hits))
                out_indices[count] = at + base
                out_values[count] = sums[at]
                sums[at] = 0
                hits &= hits - np.uint32(1)
                count += 1
    return count


@compiled
def _apply_by_walk(grad, residual, result, sums, indices, values, factor, divisor, offset):
    """Write zeros and results in one walk, so that every cache line of grad is written once.

    `result` and `sums` are the global sum, `indices` and `values` what this rank sent. Both lists
    of indices ascend, so one walk over both finds those that they share.
    """
    zeroed = i = 0
    for j in range(result.size):
        if j + PREFETCH_DISTANCE < result.size:
            prefetch(residual, np.intp(result[j + PREFETCH_DISTANCE]) - offset)
        at = np.intp(result[j]) - offset
        if at >= zeroed:
            end = min((at // APPLY_BLOCK + 1) * APPLY_BLOCK, grad.size)
            grad[zeroed:end] = 0
            zeroed = end
        grad[at] = sums[j] * factor / divisor
        while i < indices.size and indices[i] < result[j]:
            i += 1
        if i < indices.size and indices[i] == result[j]:
            residual[at] -= values[i] * factor
    grad[zeroed:] = 0


@compiled
def _apply_by_block(grad, residual, result, sums, indices, values, factor, divisor, offset):
    """The same for many entries, block by block.

    What this rank sent is spread over `sent`, with zeros elsewhere. So an entry of the result finds
    what to subtract without a comparison of the two lists of indices: at a density of 20 % the
    processor would mispredict every other one.
    """
    sent = np.empty(APPLY_BLOCK, values.dtype)
    i = j = np.intp(0)
    for start in range(0, grad.size, APPLY_BLOCK):
        end = min(start + APPLY_BLOCK, grad.size)
        base, limit = start + offset, end + offset
        average, left = grad[start:end], residual[start:end]
        sent[:] = 0
        average[:] = 0
        next_i = _first_at(indices, limit, i, indices.size)
        next_j = _first_at(result, limit, j, result.size)
        for entry in range(i, next_i):
            sent[np.uint32(indices[entry] - base)] = values[entry] * factor
        for entry in range(j, next_j):
            at = np.uint32(result[entry] - base)
            average[at] = sums[entry] * factor / divisor
            left[at] -= sent[at]
        i, j = next_i, next_j


@compiled
def _subtract_common(residual, result, indices, values, factor, offset):
    """Subtract `values` at the indices that both ascending lists have."""
    i = 0
    for j in range(result.size):
        while i < indices.size and indices[i] < result[j]:
            i += 1
        if i < indices.size and indices[i] == result[j]:
            residual[result[j] - offset] -= values[i] * factor


@compiled
def _add_at(x, indices, values, factor, offset):
    for i in range(indices.size):
        if i + PREFETCH_DISTANCE < indices.size:
            prefetch(x, np.intp(indices[i + PREFETCH_DISTANCE]) - offset)
        x[indices[i] - offset] += values[i] * factor


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
        np.zeros(MERGE_BLOCK, values.numpy().dtype),
        np.zeros(MERGE_BLOCK // 32, np.uint32),
        out_indices.numpy(),
        out_values.numpy(),
    )
    return Sparse(out_indices[:num], out_values[:num], hi)


def apply_result_(
    grad: Tensor,
    residual: Tensor,
    result: Sparse,
    sent: Sparse,
    divisor: int,
    factor: float,
    offset: int = 0,
) -> None:
    number = result.values.numpy().dtype.type
    indices, sent_lists = result.indices.numpy(), (sent.indices.numpy(), sent.values.numpy())
    if grad.dtype == result.values.dtype:
        lists = indices, result.values.numpy(), *sent_lists
        numbers = number(factor), number(divisor)
        apply = _apply_by_block if result.num > MANY * grad.numel() else _apply_by_walk
        apply(grad.numpy(), residual.numpy(), *lists, *numbers, offset)
    else:  # such as a gradient in bfloat16, which numba does not have
        grad.zero_()
        grad[result.indices.long() - offset] = (result.values * factor / divisor).to(grad.dtype)
        _subtract_common(residual.numpy(), indices, *sent_lists, number(factor), offset)


def add_at_(x: Tensor, sparse: Sparse, factor: float, offset: int = 0) -> None:
    values = sparse.values.numpy()
    _add_at(x.numpy(), sparse.indices.numpy(), values, values.dtype.type(factor), offset)


# The correction of Adam's second moment in numba: a walk over the entries that arrived.


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
