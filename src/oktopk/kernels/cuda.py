"""The kernels in Triton, for a GPU; with TRITON_INTERPRET=1 they run on CPU tensors as well.

A selection is two passes: the first counts the hits of every block, a running sum of the counts
tells each block where its hits go, the second writes them there. So the indices ascend and no order
is left to atomics; the only atomics add integers. `keys` is what is compared with the level: the
values themselves, or in `merge` a flag per value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oktopk.kernels.coding import decode_indices as decode_indices
from oktopk.kernels.coding import encode_indices as encode_indices

# torch has no faster way to look for a NaN
from oktopk.kernels.reference import AT_ONCE as AT_ONCE
from oktopk.kernels.reference import add_at_ as add_at_
from oktopk.kernels.reference import all_finite as all_finite
from oktopk.kernels.reference import count_reaching as count_reaching
from oktopk.kernels.reference import least_magnitude as least_magnitude
from oktopk.kernels.reference import survey as survey
from oktopk.kernels.reference import take_late as take_late
from oktopk.kernels.reference import trim as trim
from oktopk.sparse import EntryBuffer, Sparse, placed

BLOCK = 4096  # values per program
# no fused multiply-add: there is none to fuse, and unset it makes Triton 3.9 warn
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
DIGIT = 8  # bits of a magnitude counted in one pass of the k-th value
RADIX = 1 << DIGIT

INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


@triton.jit
def _positions(BLOCK: tl.constexpr):
    # 64 bits: the last block may reach beyond 2^31
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _hits(keys, level, inside):
    # not `>=`: a NaN must be a hit, and it is not less than anything
    return ~(tl.abs(keys) < tl.load(level)) & inside


@triton.jit
def _count(keys, level, counts, n, BLOCK: tl.constexpr):
    at = _positions(BLOCK)
    hit = _hits(tl.load(keys + at, at < n, other=0), level, at < n)
    tl.store(counts + tl.program_id(0), tl.sum(hit.to(tl.int32), 0))


@triton.jit
def _add_count(residual, grad, acc, level, counts, n, BLOCK: tl.constexpr):
    """As _count on acc, after acc = residual + grad."""
    at = _positions(BLOCK)
    total = tl.load(residual + at, at < n, other=0) + tl.load(grad + at, at < n, other=0)
    tl.store(acc + at, total, at < n)
    tl.store(counts + tl.program_id(0), tl.sum(_hits(total, level, at < n).to(tl.int32), 0))


@triton.jit
def _write(keys, level, x, ends, indices, values, capacity, n, BLOCK: tl.constexpr):
    """Write the hits of one block, which end before slot `ends` of that block."""
    at = _positions(BLOCK)
    hit = _hits(tl.load(keys + at, at < n, other=0), level, at < n)
    one_per_hit = hit.to(tl.int32)
    start = tl.load(ends + tl.program_id(0)) - tl.sum(one_per_hit, 0)
    slot = start + tl.cumsum(one_per_hit, 0) - 1
    hit &= slot < capacity
    tl.store(indices + slot, at.to(tl.int32), hit)
    tl.store(values + slot, tl.load(x + at, hit), hit)


@triton.jit(do_not_specialize=["prefix", "shift"])
def _count_digits(
    bits,
    prefix,
    shift,
    counts,
    MAGNITUDE: tl.constexpr,
    RADIX: tl.constexpr,
    n,
    BLOCK: tl.constexpr,
):
    """How often each digit stands behind `prefix`, the digits found so far."""
    at = _positions(BLOCK)
    digits = (tl.load(bits + at, at < n, other=0) & MAGNITUDE) >> shift
    candidate = (at < n) & (digits // RADIX == prefix)
    digit = tl.where(candidate, digits % RADIX, 0).to(tl.int32)
    every_digit = tl.arange(0, RADIX)
    # what is no candidate was counted as a 0: a histogram takes a mask only from Triton 3.4 on
    num_others = BLOCK - tl.sum(candidate.to(tl.int32), 0)
    num = tl.histogram(digit, RADIX) - tl.where(every_digit == 0, num_others, 0)
    tl.atomic_add(counts + every_digit, num, num > 0)


@triton.jit
def _add_part(sums, touched, indices, values, lo, n, BLOCK: tl.constexpr):
    """Add one selection. Its indices are unique, so no two lanes meet in a sum."""
    at = _positions(BLOCK)
    where = tl.load(indices + at, at < n, other=0) - lo
    total = tl.load(sums + where, at < n) + tl.load(values + at, at < n)
    tl.store(sums + where, total, at < n)
    tl.store(touched + where, 1, at < n)


@triton.jit
def _scatter(out, indices, values, n, BLOCK: tl.constexpr):
    at = _positions(BLOCK)
    where = tl.load(indices + at, at < n, other=0)
    tl.store(out + where, tl.load(values + at, at < n), at < n)


@triton.jit
def _take_common(
    residual, result, num_result, num_halvings, indices, values, n, BLOCK: tl.constexpr
):
    """Take `values` off `residual` at those of `indices` that a binary search finds in `result`."""
    at = _positions(BLOCK)
    wanted = tl.load(indices + at, at < n, other=-1)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + num_result
    for _ in range(num_halvings):
        middle = low + (high - low) // 2
        above = (low < high) & (tl.load(result + middle, low < high, other=0) < wanted)
        low = tl.where(above, middle + 1, low)
        high = tl.where(above, high, middle)
    found = tl.load(result + low, low < num_result, other=-1)
    common = (at < n) & (found == wanted)
    left = tl.load(residual + wanted, common) - tl.load(values + at, common)
    tl.store(residual + wanted, left, common)


def _launch(kernel: triton.JITFunction, n: int, *args: Tensor | int) -> None:
    """Run `kernel` on n values, on the device of its first tensor. A grid may not be empty."""
    if n:
        with torch.cuda.device_of(args[0]):
            kernel[(triton.cdiv(n, BLOCK),)](*args, n, BLOCK=BLOCK, **OPTIONS)


def _level(threshold: float, x: Tensor) -> Tensor:
    # a tensor, since Triton takes a Python float as 32 bits; rounded by `to`, since `full` refuses
    # what overflows
    return torch.full((), threshold, dtype=torch.float64, device=x.device).to(x.dtype)


def _counts(x: Tensor) -> Tensor:
    return torch.empty(triton.cdiv(x.numel(), BLOCK), dtype=torch.int32, device=x.device)


def _written(
    keys: Tensor, level: Tensor, x: Tensor, counts: Tensor, capacity: int
) -> tuple[Sparse, Tensor]:
    """Room for `capacity` entries of x whose key reaches the level, `counts` of them per block, and
    where each block ends. Nothing is waited for."""
    n = x.numel()
    indices = torch.empty(capacity, dtype=torch.int32, device=x.device)
    values = x.new_empty(capacity)
    ends = counts.cumsum(0)
    _launch(_write, n, keys, level, x, ends, indices, values, capacity)
    return Sparse(indices, values, n), ends


def _compact(
    keys: Tensor, level: Tensor, x: Tensor, counts: Tensor, capacity: int
) -> tuple[Sparse, int]:
    """The entries of x whose key reaches the level, and how many there are."""
    n = x.numel()
    room, ends = _written(keys, level, x, counts, min(capacity, n))
    count = int(ends[-1]) if n else 0
    num = min(count, room.num)
    return Sparse(room.indices[:num], room.values[:num], n), count


def kth_magnitude(x: Tensor, k: int) -> float:
    bits = x.view(INTEGER[x.dtype])
    prefix = 0
    for shift in range(8 * bits.itemsize - DIGIT, -1, -DIGIT):
        counts = torch.zeros(RADIX, dtype=torch.int32, device=x.device)
        magnitude = torch.iinfo(bits.dtype).max  # all but the sign
        _launch(_count_digits, x.numel(), bits, prefix, shift, counts, magnitude, RADIX)
        digit, k = _digit_of(k, counts.tolist())
        prefix = prefix * RADIX + digit
    return torch.tensor(prefix, dtype=bits.dtype).view(x.dtype).item()


def _digit_of(k: int, counts: list[int]) -> tuple[int, int]:
    """The digit of the k-th largest, and its rank among those that share the digit."""
    digit = len(counts) - 1
    while k > counts[digit]:
        k -= counts[digit]
        digit -= 1
    return digit, k


def select(x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]:
    level, counts = _level(threshold, x), _counts(x)
    _launch(_count, x.numel(), x, level, counts)
    return _compact(x, level, x, counts, capacity)


def take(x: Tensor, threshold: float, num: int) -> Sparse:
    level, counts = _level(threshold, x), _counts(x)
    _launch(_count, x.numel(), x, level, counts)
    return _written(x, level, x, counts, num)[0]


def accumulate_select(
    residual: Tensor,
    grad: Tensor,
    acc: Tensor,
    threshold: float,
    capacity: int,
    into: EntryBuffer | None = None,
    base: int = 0,
) -> tuple[Sparse, int]:
    level, counts = _level(threshold, acc), _counts(acc)
    _launch(_add_count, acc.numel(), residual, grad, acc, level, counts)
    found, count = _compact(acc, level, acc, counts, capacity)
    return placed(found, into, base), count


def merge(indices: Tensor, values: Tensor, splits: list[int], lo: int, hi: int) -> Sparse:
    sums = values.new_zeros(hi - lo)
    touched = torch.zeros(hi - lo, dtype=torch.int8, device=values.device)
    # one launch per part: they run one after the other, so every sum is in the order of the parts
    for where, what in zip(indices.split(splits), values.split(splits), strict=True):
        _launch(_add_part, where.numel(), sums, touched, where, what, lo)
    level, counts = touched.new_ones(()), _counts(touched)
    _launch(_count, hi - lo, touched, level, counts)
    merged, _ = _compact(touched, level, sums, counts, indices.numel())
    return Sparse(merged.indices + lo, merged.values, hi)


def settle_(
    grad: Tensor,
    residual: Tensor,
    result: Sparse,
    offered: Sparse,
    divisor: int,
    factor: float,
    base: int = 0,
) -> None:
    found, ours = result.indices - base, offered.indices - base
    # divided by a tensor: by a number, torch multiplies with the reciprocal on a GPU, which rounds
    # twice; and in torch, since Triton's own division is approximate
    quotients = (result.values * factor / result.values.new_full((), divisor)).to(grad.dtype)
    grad.zero_()
    _launch(_scatter, result.num, grad, found, quotients)
    num_halvings = result.num.bit_length()
    # multiplied in torch: Triton would fuse it with the subtraction, which rounds once
    taken = offered.values * factor
    args = residual, found, result.num, num_halvings, ours, taken
    _launch(_take_common, offered.num, *args)
