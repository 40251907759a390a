"""The kernels in numba, one core each, without the GIL.

Selection reads 32 values at a time, compares them as one vector and gets a word with a bit per hit.
At a few percent density most words have no hit or one: the first three slots are written without
asking, which costs less than a branch the processor cannot foresee. That makes the fused pass about
as fast as the addition alone (benchmarks/selection.py).
"""

# pyright: reportCallIssue=false
# (numba hands an intrinsic its first argument itself)

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels import reference
from oktopk.kernels.packing import decode_indices as decode_indices
from oktopk.kernels.packing import encode_indices as encode_indices
from oktopk.kernels.vector import (
    WIDTH,
    add_hit_word,
    compiled,
    hit_word,
    lowest_bit,
    num_bits,
    prefetch,
)
from oktopk.sparse import Sparse

AHEAD = 3  # slots written per word before looking how many hits there were
DIGIT = 16  # bits of a magnitude counted in one pass of the k-th value
SOON = 24  # entries from now
PAGE = 1024  # values zeroed at once, and then in the first cache when results are written
BLOCK = 2**15  # sums taken together: they fit the second cache

UNSIGNED = {torch.float32: np.uint32, torch.float64: np.uint64}
INTEGER = {torch.float32: np.int32, torch.float64: np.int64}


@compiled
def _emit(word, x, start, indices, values, count):
    """Write the hits of one word. Needs room for a whole word and one value behind it in x."""
    end = count + np.intp(num_bits(word))
    for ahead in range(AHEAD):
        at = start + np.intp(lowest_bit(word))
        indices[count + ahead] = at
        values[count + ahead] = x[at]
        word &= word - np.uint32(1)
    slot = count + AHEAD
    while word:
        at = start + np.intp(lowest_bit(word))
        indices[slot] = at
        values[slot] = x[at]
        word &= word - np.uint32(1)
        slot += 1
    return end


@compiled
def _select_tail(x, level, capacity, indices, values, start, count):
    for i in range(start, x.size):
        if not abs(x[i]) < level:  # a NaN is a hit here too
            if count <= capacity:
                indices[count] = i
                values[count] = x[i]
            count += 1
    return count


@compiled
def _select(x, level, threshold, capacity, indices, values):
    count = 0
    num_words = max(x.size // WIDTH - 1, 0)  # the last word has nothing behind it to read ahead
    for word in range(num_words):
        hits = hit_word(x, word * WIDTH, threshold)
        if count <= capacity:
            count = _emit(hits, x, word * WIDTH, indices, values, count)
        else:
            count += np.intp(num_bits(hits))
    return _select_tail(x, level, capacity, indices, values, num_words * WIDTH, count)


@compiled
def _accumulate(acc, grad):
    for i in range(acc.size):
        before = acc[i]
        acc[i] = before + grad[i]
        grad[i] = before


@compiled
def _accumulate_select(acc, grad, level, threshold, capacity, indices, values):
    count = 0
    num_words = max(acc.size // WIDTH - 1, 0)
    for word in range(num_words):
        hits = add_hit_word(acc, grad, word * WIDTH, threshold)
        if count <= capacity:
            count = _emit(hits, acc, word * WIDTH, indices, values, count)
        else:
            count += np.intp(num_bits(hits))
    start = num_words * WIDTH
    _accumulate(acc[start:], grad[start:])
    return _select_tail(acc, level, capacity, indices, values, start, count)


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
def _merge(indices, values, starts, ends, lo, width, sums, touched, out_indices, out_values):
    """Sum the parts block by block, so that the sums stay in the cache; part by part in a block.

    `sums` and `touched` have a block of zeros, and are left so. `starts` is moved.
    """
    count = 0
    for block in range(0, width, BLOCK):
        base, limit = lo + block, lo + min(block + BLOCK, width)
        for part in range(starts.size):
            i = starts[part]
            while i < ends[part] and indices[i] < limit:
                at = np.intp(indices[i]) - base
                sums[at] += values[i]
                touched[at >> 5] |= np.uint32(1) << np.uint32(at & 31)
                i += 1
            starts[part] = i
        for word in range((limit - base + 31) >> 5):
            hits = touched[word]
            touched[word] = 0
            while hits:
                at = word * 32 + np.intp(lowest_bit(hits))
                out_indices[count] = at + base
                out_values[count] = sums[at]
                sums[at] = 0
                hits &= hits - np.uint32(1)
                count += 1
    return count


@compiled
def _settle(grad, residual, result, sums, indices, values, factor, divisor):
    """Zeros and results in one walk, so that a cache line of grad is written once."""
    zeroed = i = 0
    for j in range(result.size):
        if j + SOON < result.size:
            prefetch(residual, np.intp(result[j + SOON]))
        at = np.intp(result[j])
        if at >= zeroed:
            end = min((at // PAGE + 1) * PAGE, grad.size)
            grad[zeroed:end] = 0
            zeroed = end
        grad[at] = sums[j] * factor / divisor
        while i < indices.size and indices[i] < at:
            i += 1
        if i < indices.size and indices[i] == at:
            residual[at] -= values[i] * factor
    grad[zeroed:] = 0


@compiled
def _take_common(residual, result, indices, values, factor):
    """Take `values` off at the indices both lists have; both ascend, so one walk finds them."""
    i = 0
    for j in range(result.size):
        while i < indices.size and indices[i] < result[j]:
            i += 1
        if i < indices.size and indices[i] == result[j]:
            residual[result[j]] -= values[i] * factor


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


@compiled
def _add_at(x, indices, values, factor):
    for i in range(indices.size):
        if i + SOON < indices.size:
            prefetch(x, np.intp(indices[i + SOON]))
        x[indices[i]] += values[i] * factor


def all_finite(x: Tensor) -> bool:
    if x.dtype not in UNSIGNED:
        return reference.all_finite(x)
    bits = x.detach().numpy().view(UNSIGNED[x.dtype])
    infinity = torch.tensor(torch.inf, dtype=x.dtype).numpy().view(bits.dtype)
    sign_off = bits.dtype.type((1 << (bits.itemsize * 8 - 1)) - 1)
    return bool(_largest(bits, sign_off) < infinity)


def kth_magnitude(x: Tensor, k: int) -> float:
    bits = x.detach().numpy().view(UNSIGNED[x.dtype])
    unsigned = bits.dtype.type
    shift = bits.itemsize * 8 - 1  # without the sign
    sign_off, prefix = unsigned((1 << shift) - 1), 0
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


def _room(x: Tensor, capacity: int) -> tuple[int, Tensor, Tensor]:
    # the compiled loops stop writing once they are past the capacity, at most one word later
    capacity = min(capacity, x.numel())
    slots = capacity + WIDTH + AHEAD
    return capacity, torch.empty(slots, dtype=torch.int32), torch.empty(slots, dtype=x.dtype)


def _bits_of(threshold: float, x: Tensor) -> tuple[np.floating, np.integer]:
    # rounded by torch: numpy warns when a large one becomes infinite
    level = x.numpy().dtype.type(torch.tensor(threshold, dtype=x.dtype).item())
    return level, level.view(INTEGER[x.dtype])


def select(x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]:
    capacity, indices, values = _room(x, capacity)
    level, bits = _bits_of(threshold, x)
    count = _select(x.numpy(), level, bits, capacity, indices.numpy(), values.numpy())
    num = min(count, capacity)
    return Sparse(indices[:num], values[:num], x.numel()), count


def accumulate_(residual: Tensor, grad: Tensor) -> None:
    _accumulate(residual.numpy(), grad.numpy())


def accumulate_select(
    residual: Tensor, grad: Tensor, threshold: float, capacity: int
) -> tuple[Sparse, int]:
    capacity, indices, values = _room(residual, capacity)
    level, bits = _bits_of(threshold, residual)
    count = _accumulate_select(
        residual.numpy(), grad.numpy(), level, bits, capacity, indices.numpy(), values.numpy()
    )
    num = min(count, capacity)
    return Sparse(indices[:num], values[:num], residual.numel()), count


def trim(sparse: Sparse, low: float, k: int) -> tuple[Sparse, float]:
    assert sparse.indices is not None
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


def count_reaching(x: Tensor, thresholds: list[float]) -> list[int]:
    bits = x.numpy().view(INTEGER[x.dtype])
    sign_off = np.iinfo(bits.dtype).max
    return [_count_reaching(bits, sign_off, _bits_of(level, x)[1]) for level in thresholds]


def merge(indices: Tensor, values: Tensor, splits: list[int], lo: int, hi: int) -> Sparse:
    at_most = min(indices.numel(), hi - lo)
    out_indices = torch.empty(at_most, dtype=torch.int32)
    out_values = torch.empty(at_most, dtype=values.dtype)
    ends = np.cumsum(splits)
    num = _merge(
        indices.numpy(),
        values.numpy(),
        ends - splits,
        ends,
        lo,
        hi - lo,
        np.zeros(BLOCK, values.numpy().dtype),
        np.zeros(BLOCK // 32, np.uint32),
        out_indices.numpy(),
        out_values.numpy(),
    )
    return Sparse(out_indices[:num], out_values[:num], hi)


def settle_(
    grad: Tensor, residual: Tensor, result: Sparse, offered: Sparse, divisor: int, factor: float
) -> None:
    assert result.indices is not None and offered.indices is not None
    number = result.values.numpy().dtype.type
    where, ours = result.indices.numpy(), (offered.indices.numpy(), offered.values.numpy())
    if grad.dtype == result.values.dtype:
        sums = where, result.values.numpy()
        _settle(grad.numpy(), residual.numpy(), *sums, *ours, number(factor), number(divisor))
    else:
        grad.zero_()
        grad[result.indices.long()] = (result.values * factor / divisor).to(grad.dtype)
        _take_common(residual.numpy(), where, *ours, number(factor))


def add_at_(x: Tensor, sparse: Sparse, factor: float) -> None:
    assert sparse.indices is not None
    values = sparse.values.numpy()
    _add_at(x.numpy(), sparse.indices.numpy(), values, values.dtype.type(factor))
