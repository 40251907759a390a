# SPDX-License-Identifier: Apache-2.0
"""Elias-Fano coding of ascending indices in Triton; `kernels.encode_elias_fano` describes the code.

Encoding takes no memory beside the words. Decoding takes two numbers for each word of high bits,
which is about a byte for each index. The host never waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oktopk.kernels.block_codes import LARGEST_INDEX
from oktopk.kernels.cuda.launch import Grid, positions

GRID = Grid(block=1024, num_warps=4)
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
        GRID.launch(_encode_low, low.numel(), indices, lo, num_low_bits, per_word, num, low)
    high.zero_()
    GRID.launch(_encode_high, num, indices, lo, num_low_bits, high)


def decode_elias_fano(low: Tensor, high: Tensor, lo: int, num_low_bits: int, out: Tensor) -> None:
    counts = torch.empty_like(high)
    GRID.launch(_count_ones, high.numel(), high, counts)
    ends = counts.cumsum(0, dtype=torch.int32)
    numbers = lo, num_low_bits, out.numel(), low.numel()
    GRID.launch(_decode, high.numel(), low, high, ends, counts, *numbers, out)
    if out.numel():  # then there are high words
        out.masked_fill_(ends[-1] != out.numel(), -1)
