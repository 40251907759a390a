"""Selection on the CPU, in numba, one core each, without the GIL.

It reads 32 values at a time, compares them as one vector and gets a word with a bit per hit.
At a few percent density most words have no hit or one: the first three slots are written without
asking, which costs less than a branch the processor cannot foresee. That makes the fused pass about
as fast as the addition alone (benchmarks/selection.py).
"""

# pyright: reportCallIssue=false
# (numba hands an intrinsic its first argument itself)

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels.counting import bits_of
from oktopk.kernels.vector import (
    WIDTH,
    add_hit_word,
    compiled,
    hit_word,
    lowest_bit,
    num_bits,
)
from oktopk.sparse import EntryBuffer, Sparse

AHEAD = 3  # slots written per word before looking how many hits there were


@compiled
def _emit(word, x, start, base, indices, values, count):
    """Write the hits of one word. Needs room for a whole word and one value behind it in x."""
    end = count + np.intp(num_bits(word))
    for ahead in range(AHEAD):
        at = start + np.intp(lowest_bit(word))
        indices[count + ahead] = at + base
        values[count + ahead] = x[at]
        word &= word - np.uint32(1)
    slot = count + AHEAD
    while word:
        at = start + np.intp(lowest_bit(word))
        indices[slot] = at + base
        values[slot] = x[at]
        word &= word - np.uint32(1)
        slot += 1
    return end


@compiled
def _select_tail(x, level, capacity, base, indices, values, start, count):
    for i in range(start, x.size):
        if not abs(x[i]) < level:  # a NaN is a hit here too
            if count <= capacity:
                indices[count] = i + base
                values[count] = x[i]
            count += 1
    return count


@compiled
def _select(x, level, threshold, capacity, indices, values):
    count = 0
    num_words = max(x.size // WIDTH - 1, 0)  # the last word has nothing behind it to read ahead
    for word in range(num_words):
        hits = hit_word(x, word * WIDTH, threshold)
        if count <= capacity:
            count = _emit(hits, x, word * WIDTH, 0, indices, values, count)
        else:
            count += np.intp(num_bits(hits))
    return _select_tail(x, level, capacity, 0, indices, values, num_words * WIDTH, count)


@compiled
def _accumulate_select(residual, grad, acc, level, threshold, capacity, base, indices, values):
    count = 0
    num_words = max(acc.size // WIDTH - 1, 0)
    for word in range(num_words):
        hits = add_hit_word(residual, grad, acc, word * WIDTH, threshold)
        if count <= capacity:
            count = _emit(hits, acc, word * WIDTH, base, indices, values, count)
        else:
            count += np.intp(num_bits(hits))
    start = num_words * WIDTH
    for i in range(start, acc.size):
        acc[i] = residual[i] + grad[i]
    return _select_tail(acc, level, capacity, base, indices, values, start, count)


def _room(x: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    # the compiled loops stop writing once they are past the capacity, at most one word later
    slots = capacity + WIDTH + AHEAD
    return torch.empty(slots, dtype=torch.int32), torch.empty(slots, dtype=x.dtype)


def select(x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]:
    capacity = min(capacity, x.numel())
    indices, values = _room(x, capacity)
    level, bits = bits_of(threshold, x)
    count = _select(x.numpy(), level, bits, capacity, indices.numpy(), values.numpy())
    num = min(count, capacity)
    return Sparse(indices[:num], values[:num], x.numel()), count


def accumulate_select(
    residual: Tensor,
    grad: Tensor,
    acc: Tensor,
    threshold: float,
    capacity: int,
    into: EntryBuffer | None = None,
    base: int = 0,
) -> tuple[Sparse, int]:
    capacity = min(capacity, residual.numel())
    indices, values = _room(residual, capacity) if into is None else into
    level, bits = bits_of(threshold, residual)
    args = residual.numpy(), grad.numpy(), acc.numpy(), level, bits, capacity, base
    count = _accumulate_select(*args, indices.numpy(), values.numpy())
    num = min(count, capacity)
    return Sparse(indices[:num], values[:num], base + residual.numel()), count
