"""What the CPU's kernels count: magnitudes by their bits, in numba."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels import reference
from oktopk.kernels.vector import compiled
from oktopk.sparse import Sparse

DIGIT = 16  # bits of a magnitude counted in one pass of the k-th value

UNSIGNED = {torch.float32: np.uint32, torch.float64: np.uint64}
INTEGER = {torch.float32: np.int32, torch.float64: np.int64}


@compiled
def _count_digits(bits, sign_off, prefix, digit, shift, counts):
    """How often each digit stands behind `prefix`, the digits found so far."""
    one = bits.dtype.type(1)
    low = (one << digit) - one
    for i in range(bits.size):
        digits = (bits[i] & sign_off) >> shift
        if (digits >> digit) == prefix:
            counts[digits & low] += 1


@compiled
def _largest(bits, sign_off):
    """The largest magnitude as bits; a vector maximum, so it runs at the speed of reading."""
    largest = sign_off - sign_off
    for i in range(bits.size):
        largest = max(largest, bits[i] & sign_off)
    return largest


@compiled
def _least(bits, sign_off):
    least = sign_off
    for i in range(bits.size):
        least = min(least, bits[i] & sign_off)
    return least


@compiled
def _count_bins(bits, sign_off, start, shift, counts):
    for i in range(bits.size):
        counts[min(((bits[i] & sign_off) - start) >> shift, counts.size - 1)] += 1


@compiled
def _compact(indices, values, bits, sign_off, level):
    """Move the entries whose magnitude reaches the level to the front, in order."""
    count = 0
    for i in range(indices.size):
        hit = (bits[i] & sign_off) >= level
        indices[count] = indices[i]
        values[count] = values[i]
        count += hit
    return count


@compiled
def _count_reaching(bits, sign_off, threshold):
    count = 0
    for i in range(bits.size):
        count += (bits[i] & sign_off) >= threshold
    return count


def bits_of(threshold: float, x: Tensor) -> tuple[np.floating, np.integer]:
    """A threshold as x has numbers, and its bits."""
    # rounded by torch: numpy warns when a large one becomes infinite
    level = x.numpy().dtype.type(torch.tensor(threshold, dtype=x.dtype).item())
    return level, level.view(INTEGER[x.dtype])


def _unsigned(x: Tensor) -> tuple[np.ndarray, np.unsignedinteger]:
    """The bits of x, and a mask for all but the sign."""
    bits = x.detach().numpy().view(UNSIGNED[x.dtype])
    return bits, bits.dtype.type((1 << (bits.itemsize * 8 - 1)) - 1)


def all_finite(x: Tensor) -> bool:
    if x.dtype not in UNSIGNED:
        return reference.all_finite(x)
    bits, sign_off = _unsigned(x)
    infinity = torch.tensor(torch.inf, dtype=x.dtype).numpy().view(bits.dtype)
    return bool(_largest(bits, sign_off) < infinity)


def least_magnitude(x: Tensor) -> float:
    bits, sign_off = _unsigned(x)
    return bits.dtype.type(_least(bits, sign_off)).view(x.numpy().dtype).item()


def kth_magnitude(x: Tensor, k: int) -> float:
    bits, sign_off = _unsigned(x)
    unsigned = bits.dtype.type
    shift, prefix = bits.itemsize * 8 - 1, 0  # without the sign
    while shift > 0:
        digit = min(DIGIT, shift)
        shift -= digit
        counts = np.zeros(1 << digit, np.int32)
        _count_digits(bits, sign_off, unsigned(prefix), unsigned(digit), unsigned(shift), counts)
        num_at_least = np.cumsum(counts[::-1])[::-1]
        found = int(np.searchsorted(-num_at_least, -k, side="right")) - 1  # last with >= k
        k -= int(num_at_least[found] - counts[found])
        prefix = prefix << digit | found
    return unsigned(prefix).view(x.numpy().dtype).item()


def trim(sparse: Sparse, low: float, k: int) -> tuple[Sparse, float]:
    values = sparse.values.numpy()
    bits = values.view(INTEGER[sparse.values.dtype])
    sign_off = np.iinfo(bits.dtype).max
    start, shift = reference.first_bin(low, sparse.values)
    counts = np.zeros(reference.BINS, np.int64)
    _count_bins(bits, sign_off, start, shift, counts)
    first = reference.threshold_bin(torch.from_numpy(counts), k)
    level = start + (first << shift)
    # the last bin has everything above it too: what reaches its end may still be in it
    fits = first < reference.BINS
    num = _compact(sparse.indices.numpy(), values, bits, sign_off, level) if fits else 0
    kept = Sparse(sparse.indices[:num], sparse.values[:num], sparse.numel)
    return kept, reference.bin_threshold(level, sparse.values.dtype)


def count_reaching(x: Tensor, thresholds: list[float]) -> Tensor:
    bits = x.numpy().view(INTEGER[x.dtype])
    sign_off = np.iinfo(bits.dtype).max
    counts = [_count_reaching(bits, sign_off, bits_of(level, x)[1]) for level in thresholds]
    return torch.tensor(counts, dtype=torch.int32)
