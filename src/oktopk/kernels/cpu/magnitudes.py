# SPDX-License-Identifier: Apache-2.0
"""What the kernels for CPUs count: magnitudes as integers (`float_bits`), in numba."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels import reference
from oktopk.kernels.cpu.vector import compiled
from oktopk.kernels.float_bits import NUM_BINS, NUMPY, bins_from, cut_bin, from_bits
from oktopk.kernels.radix import kth_largest
from oktopk.sparse import Sparse

DIGIT_BITS = 16  # counted in one pass of `kth_magnitude`: two passes for float32, four for float64
FEW_DIGIT_BITS = 11  # if there are fewer than FEW: one pass more, but the counts fit a cache
FEW = 2**17

UNSIGNED = {torch.float32: np.uint32, torch.float64: np.uint64}


@compiled
def _count_digits(bits, sign_off, prefix, digit_bits, shift, counts):
    """Count the digit at `shift` of all magnitudes that begin with the digits `prefix`."""
    one = bits.dtype.type(1)
    low = (one << digit_bits) - one
    for i in range(bits.size):
        digits = (bits[i] & sign_off) >> shift
        if (digits >> digit_bits) == prefix:
            counts[digits & low] += 1


@compiled
def _largest(bits, sign_off):
    """The largest magnitude. It compiles to a vector maximum, so it runs as fast as memory."""
    largest = sign_off - sign_off
    for i in range(bits.size):
        largest = max(largest, bits[i] & sign_off)
    return largest


@compiled
def _smallest(bits, sign_off):
    smallest = sign_off
    for i in range(bits.size):
        smallest = min(smallest, bits[i] & sign_off)
    return smallest


@compiled
def _count_bins(bits, sign_off, start, shift, counts):
    for i in range(bits.size):
        counts[min(((bits[i] & sign_off) - start) >> shift, counts.size - 1)] += 1


@compiled
def _compact(indices, values, bits, sign_off, threshold):
    """Move the entries that reach the threshold to the front, in order, and count them.

    Every entry is written, and only a hit moves the end: there is no branch to mispredict.
    """
    count = 0
    for i in range(indices.size):
        hit = (bits[i] & sign_off) >= threshold
        indices[count] = indices[i]
        values[count] = values[i]
        count += hit
    return count


@compiled
def _count_at_least(bits, sign_off, threshold):
    count = 0
    for i in range(bits.size):
        count += (bits[i] & sign_off) >= threshold
    return count


def threshold_of(threshold: float, x: Tensor) -> tuple[np.floating, np.integer]:
    """A threshold rounded to the dtype of x, and its bits as a signed integer."""
    # rounded by torch: numpy warns when a large one becomes infinite
    rounded = x.numpy().dtype.type(torch.tensor(threshold, dtype=x.dtype).item())
    return rounded, rounded.view(NUMPY[x.dtype][1])


def _unsigned(x: Tensor) -> tuple[np.ndarray, np.unsignedinteger]:
    """The bits of x as unsigned integers, and a mask of all bits but the sign."""
    bits = x.detach().numpy().view(UNSIGNED[x.dtype])
    return bits, bits.dtype.type((1 << (bits.itemsize * 8 - 1)) - 1)


def _signed(x: Tensor) -> tuple[np.ndarray, int]:
    """The bits of x as signed integers, and a mask of all bits but the sign."""
    bits = x.numpy().view(NUMPY[x.dtype][1])
    return bits, np.iinfo(bits.dtype).max


def all_finite(x: Tensor) -> bool:
    if x.dtype not in UNSIGNED:
        return reference.all_finite(x)
    bits, sign_off = _unsigned(x)
    infinity = torch.tensor(torch.inf, dtype=x.dtype).numpy().view(bits.dtype)
    return bool(_largest(bits, sign_off) < infinity)


def smallest_magnitude(x: Tensor) -> float:
    bits, sign_off = _unsigned(x)
    return bits.dtype.type(_smallest(bits, sign_off)).view(x.numpy().dtype).item()


def finite_and_smallest(sums: list[Tensor], groups: list[list[Tensor]]) -> tuple[bool, list[float]]:
    smallest = [min((smallest_magnitude(x) for x in group), default=0.0) for group in groups]
    return all(all_finite(x) for x in sums), smallest


def kth_magnitude(x: Tensor, k: int) -> float:
    bits, sign_off = _unsigned(x)
    unsigned = bits.dtype.type

    def count_digits(prefix: int, shift: int, digit_bits: int) -> np.ndarray:
        counts = np.zeros(1 << digit_bits, np.int32)
        numbers = unsigned(prefix), unsigned(digit_bits), unsigned(shift)
        _count_digits(bits, sign_off, *numbers, counts)
        return counts

    num_bits = bits.itemsize * 8 - 1  # without the sign
    digit_bits = FEW_DIGIT_BITS if bits.size < FEW else DIGIT_BITS
    kth = kth_largest(k, num_bits, digit_bits, count_digits)
    return from_bits(kth, x.dtype)


def trim(sparse: Sparse, low: float, k: int) -> tuple[Sparse, float]:
    dtype = sparse.values.dtype
    bits, sign_off = _signed(sparse.values)
    start, shift = bins_from(low, dtype)
    counts = np.zeros(NUM_BINS, np.int64)
    _count_bins(bits, sign_off, start, shift, counts)
    first = int(cut_bin(torch.from_numpy(counts), k)[0])
    threshold = start + (first << shift)
    num = 0
    if first < NUM_BINS:  # else the last bin, which has all larger magnitudes too, is dropped whole
        lists = sparse.indices.numpy(), sparse.values.numpy()
        num = _compact(*lists, bits, sign_off, threshold)
    trimmed = Sparse(sparse.indices[:num], sparse.values[:num], sparse.numel)
    return trimmed, from_bits(threshold, dtype)


def count_at_least(x: Tensor, thresholds: list[float]) -> Tensor:
    bits, sign_off = _signed(x)
    counts = [_count_at_least(bits, sign_off, threshold_of(t, x)[1]) for t in thresholds]
    return torch.tensor(counts, dtype=torch.int32)
