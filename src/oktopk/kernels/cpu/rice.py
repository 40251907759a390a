# SPDX-License-Identifier: Apache-2.0
"""Rice coding of ascending indices in numba; `kernels.encode_rice` describes the code.

Low bits pass through a 64-bit register: encoding appends at its upper end and takes full words off
its lower end, decoding does the reverse.
"""

# pyright: reportCallIssue=false
# (numba passes an intrinsic its first argument itself)

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels.block_codes import LARGEST_INDEX, MAX_RICE_BITS, RICE_BLOCK, num_blocks
from oktopk.kernels.cpu.vector import compiled, lowest_bit


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
def _encode(indices, lo, parameters, high, low):
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
def _decode(parameters, high, low, lo, out):
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
    _encode(indices.numpy(), lo, used, high, low)
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
    if not (is_whole and _decode(parameters, high, low, lo, out.numpy())):
        out.fill_(-1)
