# SPDX-License-Identifier: Apache-2.0
"""Sums of sparse vectors, and codes of indices, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oktopk.kernels.bits import LARGEST_INDEX
from oktopk.kernels.cuda.selection import GRID, Grid, compact, count_hits, positions
from oktopk.sparse import Sparse

# Sums of sparse vectors, and what is done with the result, in Triton.


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


# Elias-Fano coding of ascending indices in Triton; `kernels.encode_elias_fano` describes the code.
#
# Encoding takes no memory beside the words. Decoding takes two numbers for each word of high bits,
# which is about a byte for each index. The host never waits.


WORD_GRID = Grid(block=1024, num_warps=4)
LARGEST = tl.constexpr(LARGEST_INDEX)


@triton.jit
def _unsigned(words):
    return words.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit(do_not_specialize=["lo", "num_low_bits", "per_word"])
def _encode_low(indices, lo, num_low_bits, per_word, num, low, n, BLOCK: tl.constexpr):
    """Build each of n words from the few entries that have bits in it: no two programs write to the
    same word, and no atomics are needed."""
    word = positions(BLOCK)
    first = word * 32 // num_low_bits
    mask = (tl.full([], 1, tl.int64) << num_low_bits) - 1
    total = tl.zeros([BLOCK], tl.int64)
    for i in range(per_word):
        entry = first + i
        inside = (word < n) & (entry < num)
        offset = (tl.load(indices + entry, inside, other=0).to(tl.int64) - lo) & mask
        place = entry * num_low_bits - word * 32  # -31 at the least: it began in the word before
        left = offset << tl.minimum(tl.maximum(place, 0), 32)
        bits = tl.where(place < 0, offset >> tl.maximum(-place, 0), left)
        total |= tl.where(inside, bits & 0xFFFFFFFF, 0)
    tl.store(low + word, total.to(tl.int32), word < n)


@triton.jit(do_not_specialize=["lo", "num_low_bits"])
def _encode_high(indices, lo, num_low_bits, high, n, BLOCK: tl.constexpr):
    """Set a bit for each of n entries. Many share a word, but `or` gives the same in any order."""
    entry = positions(BLOCK)
    offset = tl.load(indices + entry, entry < n, other=0).to(tl.int64) - lo
    at = (offset >> num_low_bits) + entry
    one = (tl.full([BLOCK], 1, tl.int64) << (at & 31)).to(tl.int32)
    tl.atomic_or(high + (at >> 5), one, entry < n)


@triton.jit
def _count_ones(high, counts, n, BLOCK: tl.constexpr):
    word = positions(BLOCK)
    bits = _unsigned(tl.load(high + word, word < n, other=0))
    count = tl.zeros([BLOCK], tl.int32)
    for bit in range(32):
        count += ((bits >> bit) & 1).to(tl.int32)
    tl.store(counts + word, count, word < n)


@triton.jit(do_not_specialize=["lo", "num_low_bits"])
def _decode(low, high, ends, counts, lo, num_low_bits, num, num_low, out, n, BLOCK: tl.constexpr):
    """Decode the entries of each of n words of high bits.

    `counts` has the number of entries of a word, `ends` that of all words up to its end.
    """
    word = positions(BLOCK)
    bits = _unsigned(tl.load(high + word, word < n, other=0))
    entry = tl.load(ends + word, word < n, other=0) - tl.load(counts + word, word < n, other=0)
    entry = entry.to(tl.int64)
    mask = (tl.full([], 1, tl.int64) << num_low_bits) - 1
    for bit in range(32):
        hit = (((bits >> bit) & 1) == 1) & (entry < num)
        start = entry * num_low_bits
        first = start >> 5
        pair = _unsigned(tl.load(low + first, hit & (first < num_low), other=0))
        more = _unsigned(tl.load(low + first + 1, hit & (first + 1 < num_low), other=0))
        lower = ((pair | (more << 32)) >> (start & 31)) & mask
        upper = word * 32 + bit - entry
        index = tl.minimum((upper << num_low_bits) + lower + lo, LARGEST)  # which is never sound
        tl.store(out + entry, index.to(tl.int32), hit)
        entry += hit.to(tl.int64)


def encode_elias_fano(
    indices: Tensor, lo: int, num_low_bits: int, low: Tensor, high: Tensor
) -> None:
    num = indices.numel()
    if num_low_bits:
        # the entries that fill a word, one that ends in it and one that begins in it
        per_word = 31 // num_low_bits + 2
        WORD_GRID.launch(_encode_low, low.numel(), indices, lo, num_low_bits, per_word, num, low)
    high.zero_()
    WORD_GRID.launch(_encode_high, num, indices, lo, num_low_bits, high)


def decode_elias_fano(low: Tensor, high: Tensor, lo: int, num_low_bits: int, out: Tensor) -> None:
    counts = torch.empty_like(high)
    WORD_GRID.launch(_count_ones, high.numel(), high, counts)
    ends = counts.cumsum(0, dtype=torch.int32)
    numbers = lo, num_low_bits, out.numel(), low.numel()
    WORD_GRID.launch(_decode, high.numel(), low, high, ends, counts, *numbers, out)
    if out.numel():  # then there are high words
        out.masked_fill_(ends[-1] != out.numel(), -1)
