# SPDX-License-Identifier: Apache-2.0
"""Low-bit values in numba; `kernels.quantize` describes them.

The arithmetic is that of `reference_codes`, operation by operation in float32, so that the bits are
the same. One block at a time: it stays in the first cache while it is read several times.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from oktopk.kernels.block_codes import (
    FIXED_POINT,
    LARGEST_BFLOAT16,
    NAN_BITS,
    QUANTIZE_BLOCK,
    QUANTIZERS,
)
from oktopk.kernels.cpu.vector import compiled

F32 = np.float32
INFINITE = np.int32(0x7F800000)  # the bits of Inf; those of a NaN, without its sign, are larger
MAGNITUDE = np.int32(0x7FFFFFFF)
NO_CUT = F32(-1)


@compiled
def _mean(total, count, largest):
    return F32(total) / F32(count) * F32(1 / FIXED_POINT) * largest


@compiled
def _class_means(magnitudes, smallest, largest, cut_at):
    """The means of the lower and of the upper class of one block, before they are rounded."""
    cut = smallest + (largest - smallest) * cut_at
    all_values, upper, num_upper = np.int64(0), np.int64(0), np.int64(0)
    for m in magnitudes:
        fixed = np.int64(np.rint(m / largest * F32(FIXED_POINT))) if largest > 0 else np.int64(0)
        is_upper = m >= cut
        all_values += fixed
        upper += fixed if is_upper else np.int64(0)
        num_upper += is_upper
    b = _mean(upper, num_upper, largest)
    num_lower = magnitudes.size - num_upper
    return (_mean(all_values - upper, num_lower, largest) if num_lower else b), b


@compiled
def _rounded_to_bfloat16(bits):
    """The bits of a float32, rounded to those of a bfloat16, ties to even; a NaN stays one."""
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits + half) & np.uint32(0xFFFF0000)


@compiled
def _set_levels(a, b, fractions, levels):
    bits = levels.view(np.uint32)
    for j in range(fractions.size):
        levels[j] = a + (b - a) * fractions[j]
        bits[j] = _rounded_to_bfloat16(bits[j])


@compiled
def _pack(code, num_bits, codes, first):
    """Write the codes of one block as words, from the word `first` on."""
    per_word = 32 // num_bits
    num_full = code.size // per_word
    for word in range(num_full):
        packed = np.uint32(0)
        for i in range(per_word):
            packed |= code[word * per_word + i] << np.uint32(i * num_bits)
        codes[first + word] = packed
    if num_full * per_word < code.size:
        packed = np.uint32(0)
        for i in range(code.size - num_full * per_word):
            packed |= code[num_full * per_word + i] << np.uint32(i * num_bits)
        codes[first + num_full] = packed


@compiled
def _quantize(bits, num_bits, cut_at, fractions, parameters, codes):
    """Magnitudes are compared as their bits, so that LLVM makes vectors of the loop that does it:
    the order of floats, in which a NaN has no place, would keep it from that."""
    num_parameters = 1 if fractions.size == 1 else 2
    sign_shift = np.uint32(num_bits - 1)
    magnitudes, code = np.empty(QUANTIZE_BLOCK, F32), np.empty(QUANTIZE_BLOCK, np.uint32)
    magnitude_bits = magnitudes.view(np.int32)
    ends, levels = np.empty(2, F32), np.empty(fractions.size, F32)
    end_bits = ends.view(np.uint32)
    for start in range(0, bits.size, QUANTIZE_BLOCK):
        num, block = min(QUANTIZE_BLOCK, bits.size - start), start // QUANTIZE_BLOCK
        values = bits[start : start + num]
        smallest, largest = MAGNITUDE, np.int32(0)
        for i in range(num):
            magnitude = values[i] & MAGNITUDE
            magnitude_bits[i] = magnitude
            smallest, largest = min(smallest, magnitude), max(largest, magnitude)
            code[i] = (np.uint32(values[i]) >> np.uint32(31)) << sign_shift
        if largest < INFINITE:
            end_bits[0], end_bits[1] = smallest, largest
            if cut_at != NO_CUT:
                ends[0], ends[1] = _class_means(magnitudes[:num], ends[0], ends[1], cut_at)
            for j in range(2):
                ends[j] = min(ends[j], F32(LARGEST_BFLOAT16))
                end_bits[j] = _rounded_to_bfloat16(end_bits[j])
            _set_levels(ends[0], ends[1], fractions, levels)
            for j in range(levels.size - 1):
                cut = levels[j] * F32(0.5) + levels[j + 1] * F32(0.5)
                for i in range(num):
                    code[i] += np.uint32(magnitudes[i] >= cut)
        else:
            end_bits[:] = np.uint32(NAN_BITS << 16)
        for j in range(num_parameters):
            upper_half = end_bits[2 - num_parameters + j] >> np.uint32(16)
            parameters[block * num_parameters + j] = upper_half
        _pack(code[:num], num_bits, codes, block * (QUANTIZE_BLOCK * num_bits // 32))


@compiled
def _dequantize(parameters, codes, num_bits, fractions, out):
    num_parameters = 1 if fractions.size == 1 else 2
    per_word, mask = 32 // num_bits, np.uint32((1 << num_bits) - 1)
    table = np.empty(2 * fractions.size, F32)  # by code: the levels, then the same with a sign
    ends = np.empty(2, F32)
    end_bits = ends.view(np.uint32)
    for word in range(codes.size):
        start = word * per_word
        if start % QUANTIZE_BLOCK == 0:  # a block has whole words
            first = start // QUANTIZE_BLOCK * num_parameters
            for j in range(2):
                sent = parameters[first + min(j, num_parameters - 1)]
                end_bits[j] = np.uint32(sent) << np.uint32(16)
            _set_levels(ends[0], ends[1], fractions, table)
            for j in range(fractions.size):
                table[fractions.size + j] = -table[j]
        packed = codes[word]
        for at in range(start, min(start + per_word, out.size)):
            out[at] = table[packed & mask]
            packed >>= np.uint32(num_bits)


def _constants(num_bits: int) -> tuple[np.float32, np.ndarray]:
    quantizer = QUANTIZERS[num_bits]
    cut = NO_CUT if quantizer.cut is None else F32(quantizer.cut)
    return cut, np.array(quantizer.fractions, F32)


def quantize(values: Tensor, num_bits: int, parameters: Tensor, codes: Tensor) -> None:
    cut, fractions = _constants(num_bits)
    parameters.zero_()
    sent = parameters.numpy().view(np.uint16), codes.numpy().view(np.uint32)
    _quantize(values.numpy().view(np.int32), num_bits, cut, fractions, *sent)


def dequantize(parameters: Tensor, codes: Tensor, num_bits: int, out: Tensor) -> None:
    sent = parameters.numpy().view(np.uint16), codes.numpy().view(np.uint32)
    _dequantize(*sent, num_bits, _constants(num_bits)[1], out.numpy())
