# SPDX-License-Identifier: Apache-2.0
"""Codes of indices and values in numba."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels.bits import (
    FIXED_POINT,
    LARGEST_BFLOAT16,
    LARGEST_INDEX,
    MAX_RICE_BITS,
    NAN_BITS,
    QUANTIZE_BLOCK,
    QUANTIZERS,
    RICE_BLOCK,
    num_blocks,
)
from oktopk.kernels.cpu.selection import compiled, lowest_bit

# Elias-Fano coding of ascending indices in numba; `kernels.encode_elias_fano` describes the code.
#
# Low bits pass through a 64-bit register: encoding appends at its upper end and takes full words
# off its lower end, decoding does the reverse.


# pyright: reportCallIssue=false
# (numba passes an intrinsic its first argument itself)


@compiled
def _encode_elias_fano(indices, lo, num_low_bits, low, high):
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
def _decode_elias_fano(low, high, lo, num_low_bits, out):
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
    _encode_elias_fano(indices.numpy(), lo, num_low_bits, *words)


def decode_elias_fano(low: Tensor, high: Tensor, lo: int, num_low_bits: int, out: Tensor) -> None:
    words = low.numpy().view(np.uint32), high.numpy().view(np.uint32)
    if not _decode_elias_fano(*words, lo, num_low_bits, out.numpy()):
        out.fill_(-1)


# Rice coding of ascending indices in numba; `kernels.encode_rice` describes the code.
#
# Low bits pass through a 64-bit register: encoding appends at its upper end and takes full words
# off its lower end, decoding does the reverse.


# pyright: reportCallIssue=false
# (numba passes an intrinsic its first argument itself)


@compiled
def _halves(gaps, bits):
    """How many high bits all gaps save together by one low bit more than `bits`."""
    total = 0
    for i in range(gaps.size):
        total += ((gaps[i] >> bits) + 1) >> 1
    return total


@compiled
def _choose(indices, lo, parameters):
    """Set the parameter of each block; return how many high and how many low bits that takes."""
    gaps = np.empty(RICE_BLOCK, np.int32)
    before, num_high, num_low = lo - 1, indices.size, 0
    for block in range(parameters.size):
        part = indices[block * RICE_BLOCK : (block + 1) * RICE_BLOCK]
        mean = (np.int64(part[-1]) - before) // part.size
        for i in range(part.size):
            gaps[i] = part[i] - before - 1
            before = np.int64(part[i])
        used = gaps[: part.size]
        bits = np.int32(0)
        while mean >> (bits + 1):  # near the best, which the two loops below find
            bits += np.int32(1)
        while bits and _halves(used, bits - np.int32(1)) <= part.size:
            bits -= np.int32(1)
        while bits < 31 and _halves(used, bits) > part.size:
            bits += np.int32(1)
        parameters[block] = bits
        num_low += np.int64(bits) * part.size
        for i in range(part.size):
            num_high += used[i] >> bits
    return num_high, num_low


@compiled
def _encode_rice(indices, lo, parameters, high, low):
    held, num_held, word = np.uint64(0), np.uint64(0), 0
    full = np.uint64(32)
    before, at = lo - 1, -1
    high[:] = 0
    for block in range(parameters.size):
        bits = np.uint64(parameters[block])
        mask = (np.uint64(1) << bits) - np.uint64(1)
        for i in range(block * RICE_BLOCK, min((block + 1) * RICE_BLOCK, indices.size)):
            gap = np.uint64(indices[i] - before - 1)
            before = np.int64(indices[i])
            held |= (gap & mask) << num_held
            num_held += bits
            if num_held >= full:
                low[word] = np.uint32(held & np.uint64(0xFFFFFFFF))
                word += 1
                held >>= full
                num_held -= full
            at += np.intp(gap >> bits) + 1
            high[at >> 5] |= np.uint32(1) << np.uint32(at & 31)
    if num_held:
        low[word] = np.uint32(held)


@compiled
def _decode_rice(parameters, high, low, lo, out):
    """Fill `out`; whether the words hold as many indices, the last of which is not too large."""
    held, num_held, word, count, block_end = np.uint64(0), np.uint64(0), 0, 0, 0
    full, bits, mask = np.uint64(32), np.uint64(0), np.uint64(0)
    index, last = lo - 1, -1
    for at in range(high.size):
        ones = high[at]
        while ones:
            if count == out.size:
                return False
            if count == block_end:
                bits = np.uint64(parameters[count // RICE_BLOCK])
                mask = (np.uint64(1) << bits) - np.uint64(1)
                block_end += RICE_BLOCK
            if num_held < bits:
                held |= np.uint64(low[word]) << num_held
                word += 1
                num_held += full
            position = at * 32 + np.intp(lowest_bit(ones))
            quotient = np.uint64(position - last - 1)
            last = position
            index += np.int64((quotient << bits) | (held & mask)) + 1
            out[count] = index
            held >>= bits
            num_held -= bits
            ones &= ones - np.uint32(1)  # clears the lowest one
            count += 1
    return count == out.size and index <= LARGEST_INDEX


def encode_rice(indices: Tensor, lo: int) -> Tensor:
    num_parameters = num_blocks(indices.numel(), RICE_BLOCK)
    parameters = np.zeros(-(-num_parameters // 4) * 4, np.uint8)
    used = parameters[:num_parameters]
    num_high, num_low = _choose(indices.numpy(), lo, used)
    sizes = [len(parameters) // 4, -(-num_high // 32), -(-num_low // 32)]
    words = torch.empty(sum(sizes), dtype=torch.int32)
    head, high, low = np.split(words.numpy().view(np.uint32), np.cumsum(sizes)[:2])
    head[:] = parameters.view(np.uint32)
    _encode_rice(indices.numpy(), lo, used, high, low)
    return words


def decode_rice(words: Tensor, lo: int, out: Tensor) -> None:
    num_parameters = num_blocks(out.numel(), RICE_BLOCK)
    num_head = -(-num_parameters // 4)
    everything = words.numpy().view(np.uint32)
    if len(everything) < num_head:
        out.fill_(-1)
        return
    parameters = everything[:num_head].view(np.uint8)[:num_parameters]
    blocks = np.full(num_parameters, RICE_BLOCK)
    blocks[-1:] -= -out.numel() % RICE_BLOCK
    num_high = len(everything) - num_head - -(-int(blocks @ parameters) // 32)
    # no bit is read before the sizes that the words tell are known to fit them
    is_whole = num_high >= 0 and parameters.max(initial=0) <= MAX_RICE_BITS
    high, low = np.split(everything[num_head:], [max(num_high, 0)])
    if not (is_whole and _decode_rice(parameters, high, low, lo, out.numpy())):
        out.fill_(-1)


# Low-bit values in numba; `kernels.quantize` describes them.
#
# The arithmetic is that of `reference_codes`, operation by operation in float32, so that the bits
# are the same. One block at a time: it stays in the first cache while it is read several times.


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


# The check of indices that came from another rank, in numba.


@compiled
def _num_descents(indices):
    """How often an index is no larger than the one before. No early end: it compiles to vectors."""
    count = 0
    for i in range(1, indices.size):
        count += indices[i] <= indices[i - 1]
    return count


def ascend_within(indices: Tensor, lo: int, hi: int) -> Tensor:
    numbers = indices.numpy()
    if not numbers.size:
        return torch.tensor(True)
    return torch.tensor(bool(numbers[0] >= lo and numbers[-1] < hi) and not _num_descents(numbers))
