"""Elias-Fano words of ascending indices, in numba (`kernels.encode_indices` says what they are)."""

# pyright: reportCallIssue=false
# (numba hands an intrinsic its first argument itself)

from __future__ import annotations

import numpy as np
from torch import Tensor

from oktopk.kernels.vector import compiled, lowest_bit


@compiled
def _encode_indices(indices, lo, low_bits, low, high):
    held, filled, word = np.uint64(0), np.uint64(0), 0
    bits = np.uint64(low_bits)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    full = np.uint64(32)
    high[:] = 0
    for i in range(indices.size):
        offset = np.uint64(indices[i] - lo)
        held |= (offset & mask) << filled
        filled += bits
        if filled >= full:
            low[word] = np.uint32(held & np.uint64(0xFFFFFFFF))
            word += 1
            held >>= full
            filled -= full
        at = np.intp(offset >> bits) + i
        high[at >> 5] |= np.uint32(1) << np.uint32(at & 31)
    if filled:
        low[word] = np.uint32(held)


@compiled
def _decode_indices(low, high, lo, low_bits, out):
    held, filled, word, count = np.uint64(0), np.uint64(0), 0, 0
    bits = np.uint64(low_bits)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    full = np.uint64(32)
    for at in range(high.size):
        ones = high[at]
        while ones and count < out.size:
            if filled < bits:
                held |= np.uint64(low[word]) << filled
                word += 1
                filled += full
            upper = at * 32 + np.intp(lowest_bit(ones)) - count
            out[count] = lo + ((upper << low_bits) | np.intp(held & mask))
            held >>= bits
            filled -= bits
            ones &= ones - np.uint32(1)
            count += 1


def encode_indices(indices: Tensor, lo: int, low_bits: int, low: Tensor, high: Tensor) -> None:
    words = low.numpy().view(np.uint32), high.numpy().view(np.uint32)
    _encode_indices(indices.numpy(), lo, low_bits, *words)


def decode_indices(low: Tensor, high: Tensor, lo: int, low_bits: int, out: Tensor) -> None:
    words = low.numpy().view(np.uint32), high.numpy().view(np.uint32)
    _decode_indices(*words, lo, low_bits, out.numpy())
