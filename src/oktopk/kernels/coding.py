"""Elias-Fano words of ascending indices, in Triton (`kernels.encode_indices` says what they are).

Encoding takes no memory beside the words. Decoding takes two numbers for each word of high bits,
that is a byte or so for each index. Nothing makes the host wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # entries or words per program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # there are no floats; unset it warns


@triton.jit
def _positions(BLOCK: tl.constexpr):
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _unsigned(words):
    return words.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit(do_not_specialize=["lo", "low_bits", "per_word"])
def _encode_low(indices, lo, low_bits, per_word, num, low, n, BLOCK: tl.constexpr):
    """Each of n words from the few entries that have bits in it, so no two programs meet."""
    word = _positions(BLOCK)
    first = word * 32 // low_bits
    mask = (tl.full([], 1, tl.int64) << low_bits) - 1
    total = tl.zeros([BLOCK], tl.int64)
    for i in range(per_word):
        entry = first + i
        inside = (word < n) & (entry < num)
        offset = (tl.load(indices + entry, inside, other=0).to(tl.int64) - lo) & mask
        place = entry * low_bits - word * 32  # from -31, where it began in the word before
        left = offset << tl.minimum(tl.maximum(place, 0), 32)
        bits = tl.where(place < 0, offset >> tl.maximum(-place, 0), left)
        total |= tl.where(inside, bits & 0xFFFFFFFF, 0)
    tl.store(low + word, total.to(tl.int32), word < n)


@triton.jit(do_not_specialize=["lo", "low_bits"])
def _encode_high(indices, lo, low_bits, high, n, BLOCK: tl.constexpr):
    """A one for each of n entries. Many share a word; the order in which they set it is nothing."""
    entry = _positions(BLOCK)
    offset = tl.load(indices + entry, entry < n, other=0).to(tl.int64) - lo
    at = (offset >> low_bits) + entry
    one = (tl.full([BLOCK], 1, tl.int64) << (at & 31)).to(tl.int32)
    tl.atomic_or(high + (at >> 5), one, entry < n)


@triton.jit
def _count_ones(high, counts, n, BLOCK: tl.constexpr):
    word = _positions(BLOCK)
    bits = _unsigned(tl.load(high + word, word < n, other=0))
    count = tl.zeros([BLOCK], tl.int32)
    for bit in range(32):
        count += ((bits >> bit) & 1).to(tl.int32)
    tl.store(counts + word, count, word < n)


@triton.jit(do_not_specialize=["lo", "low_bits"])
def _decode(low, high, ends, counts, lo, low_bits, num, num_low, out, n, BLOCK: tl.constexpr):
    """The entries of each of n words of high bits; `ends` says how many there are up to its end."""
    word = _positions(BLOCK)
    bits = _unsigned(tl.load(high + word, word < n, other=0))
    entry = tl.load(ends + word, word < n, other=0) - tl.load(counts + word, word < n, other=0)
    entry = entry.to(tl.int64)
    mask = (tl.full([], 1, tl.int64) << low_bits) - 1
    for bit in range(32):
        hit = (((bits >> bit) & 1) == 1) & (entry < num)
        start = entry * low_bits
        first = start >> 5
        pair = _unsigned(tl.load(low + first, hit & (first < num_low), other=0))
        more = _unsigned(tl.load(low + first + 1, hit & (first + 1 < num_low), other=0))
        lower = ((pair | (more << 32)) >> (start & 31)) & mask
        upper = word * 32 + bit - entry
        tl.store(out + entry, ((upper << low_bits) + lower + lo).to(tl.int32), hit)
        entry += hit.to(tl.int64)


def _launch(kernel: triton.JITFunction, n: int, *args: Tensor | int) -> None:
    if n:
        with torch.cuda.device_of(args[0]):
            kernel[(triton.cdiv(n, BLOCK),)](*args, n, BLOCK=BLOCK, **OPTIONS)


def encode_indices(indices: Tensor, lo: int, low_bits: int, low: Tensor, high: Tensor) -> None:
    num = indices.numel()
    if low_bits:
        # an entry that ends in a word and one that begins in it, beside those that fill it
        per_word = 31 // low_bits + 2
        _launch(_encode_low, low.numel(), indices, lo, low_bits, per_word, num, low)
    high.zero_()
    _launch(_encode_high, num, indices, lo, low_bits, high)


def decode_indices(low: Tensor, high: Tensor, lo: int, low_bits: int, out: Tensor) -> None:
    counts = torch.empty_like(high)
    _launch(_count_ones, high.numel(), high, counts)
    ends = counts.cumsum(0, dtype=torch.int32)
    numbers = lo, low_bits, out.numel(), low.numel()
    _launch(_decode, high.numel(), low, high, ends, counts, *numbers, out)
