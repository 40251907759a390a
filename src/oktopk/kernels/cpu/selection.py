# SPDX-License-Identifier: Apache-2.0
"""Selection by a threshold in numba.

The loops read 32 values at a time and compare them as one vector, which gives a word with a bit per
hit. At a density of a few percent most words have no hit or one. So three slots of the output are
written for every word without a branch, whether it has hits or not: that costs less than a branch
that the processor mispredicts. What was written without a hit is overwritten by the next word. The
fused pass is about as fast as the addition alone (benchmarks/selection.py).
"""

# pyright: reportCallIssue=false
# (numba passes an intrinsic its first argument itself)

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels.cpu.magnitudes import threshold_of
from oktopk.kernels.cpu.vector import (
    WIDTH,
    add_hit_word,
    compiled,
    hit_word,
    lowest_bit,
    num_bits,
)
from oktopk.sparse import EntryBuffer, Sparse

UNCONDITIONAL = 3  # slots written per word before looking how many hits it has


@compiled
def _write_hits(word, x, start, offset, indices, values, count):
    """Write the hits of one word behind the `count` entries so far; the count after it.

    The outputs need room for a whole word of hits. An empty word has its lowest bit at 32, so x is
    read one value behind the word.
    """
    end = count + np.intp(num_bits(word))
    for i in range(UNCONDITIONAL):
        at = start + np.intp(lowest_bit(word))
        indices[count + i] = at + offset
        values[count + i] = x[at]
        word &= word - np.uint32(1)
    slot = count + UNCONDITIONAL
    while word:
        at = start + np.intp(lowest_bit(word))
        indices[slot] = at + offset
        values[slot] = x[at]
        word &= word - np.uint32(1)
        slot += 1
    return end


@compiled
def _select_tail(x, threshold, capacity, offset, indices, values, start, count):
    for i in range(start, x.size):
        if not abs(x[i]) < threshold:  # a NaN is a hit here too
            if count <= capacity:
                indices[count] = i + offset
                values[count] = x[i]
            count += 1
    return count


@compiled
def _select(x, threshold, threshold_bits, capacity, indices, values):
    count = offset = np.intp(0)
    num_words = max(x.size // WIDTH - 1, 0)  # not the last: a value behind each word is read
    for word in range(num_words):
        hits = hit_word(x, word * WIDTH, threshold_bits)
        if count <= capacity:
            count = _write_hits(hits, x, word * WIDTH, offset, indices, values, count)
        else:
            count += np.intp(num_bits(hits))
    return _select_tail(x, threshold, capacity, offset, indices, values, num_words * WIDTH, count)


@compiled
def _accumulate_select(
    residual, grad, acc, threshold, threshold_bits, capacity, offset, indices, values
):
    count = np.intp(0)
    num_words = max(acc.size // WIDTH - 1, 0)
    for word in range(num_words):
        hits = add_hit_word(residual, grad, acc, word * WIDTH, threshold_bits)
        if count <= capacity:
            count = _write_hits(hits, acc, word * WIDTH, offset, indices, values, count)
        else:
            count += np.intp(num_bits(hits))
    start = num_words * WIDTH
    for i in range(start, acc.size):
        acc[i] = residual[i] + grad[i]
    return _select_tail(acc, threshold, capacity, offset, indices, values, start, count)


def _new_outputs(x: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    # the loops write until they are past the capacity, which is at most one word behind it
    slots = capacity + WIDTH + UNCONDITIONAL
    return torch.empty(slots, dtype=torch.int32), torch.empty(slots, dtype=x.dtype)


def select(x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]:
    capacity = min(capacity, x.numel())
    indices, values = _new_outputs(x, capacity)
    rounded, bits = threshold_of(threshold, x)
    count = _select(x.numpy(), rounded, bits, capacity, indices.numpy(), values.numpy())
    num = min(count, capacity)
    return Sparse(indices[:num], values[:num], x.numel()), count


def select_counted(x: Tensor, threshold: float, count: int) -> Sparse:
    return select(x, threshold, count)[0]


def accumulate_select(
    residual: Tensor,
    grad: Tensor,
    acc: Tensor,
    threshold: float,
    capacity: int,
    out: EntryBuffer | None = None,
    offset: int = 0,
) -> tuple[Sparse, int]:
    capacity = min(capacity, residual.numel())
    indices, values = _new_outputs(residual, capacity) if out is None else out
    rounded, bits = threshold_of(threshold, residual)
    args = residual.numpy(), grad.numpy(), acc.numpy(), rounded, bits, capacity, offset
    count = _accumulate_select(*args, indices.numpy(), values.numpy())
    num = min(count, capacity)
    return Sparse(indices[:num], values[:num], offset + residual.numel()), count
