# SPDX-License-Identifier: Apache-2.0
"""Elias-Fano coding of ascending indices in numba; `kernels.encode_elias_fano` describes the code.

Low bits pass through a 64-bit register: encoding appends at its upper end and takes full words off
its lower end, decoding does the reverse.
"""

# pyright: reportCallIssue=false
# (numba passes an intrinsic its first argument itself)

from __future__ import annotations

import numpy as np
from torch import Tensor

from oktopk.kernels.block_codes import LARGEST_INDEX
from oktopk.kernels.cpu.vector import compiled, lowest_bit


@compiled
def _encode(indices, lo, num_low_bits, low, high):
    held, num_held, word = np.uint64(0), np.uint64(0), 0
    bits = np.uint64(num_low_bits)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    full = np.uint64(32)
    high[:] = 0
    for i in range(indices.size):
        offset = np.uint64(indices[i] - lo)
        held |= (offset & mask) << num_held
        num_held += bits
        if num_held >= full:
            low[word] = np.uint32(held & np.uint64(0xFFFFFFFF))
            word += 1
            held >>= full
            num_held -= full
        at = np.intp(offset >> bits) + i
        high[at >> 5] |= np.uint32(1) << np.uint32(at & 31)
    if num_held:
        low[word] = np.uint32(held)


@compiled
def _decode(low, high, lo, num_low_bits, out):
    """Fill `out`; whether the words hold as many indices, the last of which is not too large."""
    held, num_held, word, count, index = np.uint64(0), np.uint64(0), 0, 0, lo
    bits = np.uint64(num_low_bits)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    full = np.uint64(32)
    for at in range(high.size):
        ones = high[at]
        while ones:
            if count == out.size:
                return False
            if num_held < bits:
                held |= np.uint64(low[word]) << num_held
                word += 1
                num_held += full
            upper = at * 32 + np.intp(lowest_bit(ones)) - count
            index = lo + ((upper << num_low_bits) | np.intp(held & mask))
            out[count] = index
            held >>= bits
            num_held -= bits
            ones &= ones - np.uint32(1)  # clears the lowest one
            count += 1
    return count == out.size and index <= LARGEST_INDEX


def encode_elias_fano(
    indices: Tensor, lo: int, num_low_bits: int, low: Tensor, high: Tensor
) -> None:
    words = low.numpy().view(np.uint32), high.numpy().view(np.uint32)
    _encode(indices.numpy(), lo, num_low_bits, *words)


def decode_elias_fano(low: Tensor, high: Tensor, lo: int, num_low_bits: int, out: Tensor) -> None:
    words = low.numpy().view(np.uint32), high.numpy().view(np.uint32)
    if not _decode(*words, lo, num_low_bits, out.numpy()):
        out.fill_(-1)
