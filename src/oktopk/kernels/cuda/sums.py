# SPDX-License-Identifier: Apache-2.0
"""Sums of sparse vectors, and what is done with the result, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oktopk.kernels.cuda.launch import positions
from oktopk.kernels.cuda.selection import GRID, compact, count_hits
from oktopk.sparse import Sparse


@triton.jit
def _add_part(sums, is_set, indices, values, lo, n, BLOCK: tl.constexpr):
    """Add one selection. Its indices are unique, so no two lanes add to the same sum."""
    at = positions(BLOCK)
    where = tl.load(indices + at, at < n, other=0) - lo
    total = tl.load(sums + where, at < n) + tl.load(values + at, at < n)
    tl.store(sums + where, total, at < n)
    tl.store(is_set + where, 1, at < n)


@triton.jit
def _scatter(out, indices, values, n, BLOCK: tl.constexpr):
    at = positions(BLOCK)
    where = tl.load(indices + at, at < n, other=0)
    tl.store(out + where, tl.load(values + at, at < n), at < n)


@triton.jit
def _subtract_common(
    residual, result, num_result, num_halvings, indices, values, n, BLOCK: tl.constexpr
):
    """Subtract `values` from `residual` at those of `indices` that `result` has too.

    Each lane looks its index up in `result`, which ascends, by a binary search.
    """
    at = positions(BLOCK)
    wanted = tl.load(indices + at, at < n, other=-1)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + num_result
    for _ in range(num_halvings):
        middle = low + (high - low) // 2
        above = (low < high) & (tl.load(result + middle, low < high, other=0) < wanted)
        low = tl.where(above, middle + 1, low)
        high = tl.where(above, high, middle)
    found = tl.load(result + low, low < num_result, other=-1)
    common = (at < n) & (found == wanted)
    left = tl.load(residual + wanted, common) - tl.load(values + at, common)
    tl.store(residual + wanted, left, common)


def merge(indices: Tensor, values: Tensor, splits: list[int], lo: int, hi: int) -> Sparse:
    sums = values.new_zeros(hi - lo)
    is_set = torch.zeros(hi - lo, dtype=torch.int8, device=values.device)
    # one launch per part: they run one after the other, so every sum is in the order of the parts
    for part_indices, part in zip(indices.split(splits), values.split(splits), strict=True):
        GRID.launch(_add_part, part_indices.numel(), sums, is_set, part_indices, part, lo)
    one = is_set.new_ones(())
    merged, _ = compact(is_set, one, sums, count_hits(is_set, one), indices.numel())
    return Sparse(merged.indices + lo, merged.values, hi)


def apply_result_(
    grad: Tensor,
    residual: Tensor,
    result: Sparse,
    sent: Sparse,
    divisor: int,
    factor: float,
    offset: int = 0,
) -> None:
    indices, sent_indices = result.indices - offset, sent.indices - offset
    # divided by a tensor: by a number, torch multiplies with the reciprocal on a GPU, which rounds
    # twice; and in torch, since Triton's own division is approximate
    quotients = (result.values * factor / result.values.new_full((), divisor)).to(grad.dtype)
    grad.zero_()
    GRID.launch(_scatter, result.num, grad, indices, quotients)
    num_halvings = result.num.bit_length()
    # multiplied in torch: Triton would fuse it with the subtraction, which rounds once
    applied = sent.values * factor
    args = residual, indices, result.num, num_halvings, sent_indices, applied
    GRID.launch(_subtract_common, sent.num, *args)
