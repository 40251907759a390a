# SPDX-License-Identifier: Apache-2.0
"""Selection by a threshold in Triton.

A selection takes two passes. The first counts the hits of every block. A running sum of the counts
tells each block where its hits go, and the second pass writes them there. So the indices ascend and
no order is left to atomics; the only atomics add integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oktopk.kernels.bits import INTEGER, from_bits, kth_largest
from oktopk.sparse import EntryBuffer, Sparse, placed

# How Triton kernels are launched: one program for each block of values.


@dataclass(frozen=True, slots=True)
class Grid:
    """The shape of a launch."""

    block: int
    """Values per program."""

    num_warps: int

    def num_programs(self, n: int) -> int:
        return triton.cdiv(n, self.block)

    @property
    def options(self) -> dict[str, int | bool]:
        """Keywords of a launch. There is no multiply-add to fuse, but Triton 3.9 warns unless it is
        told so."""
        return {
            "BLOCK": self.block,
            "num_warps": self.num_warps,
            "enable_fp_fusion": False,
        }

    def launch(self, kernel: triton.JITFunction, n: int, *args: Tensor | int) -> None:
        """Run `kernel` on n values, on the device of its first argument; not at all if n is 0."""
        if n:
            with torch.cuda.device_of(args[0]):
                kernel[(self.num_programs(n),)](*args, n, **self.options)


@triton.jit
def positions(BLOCK: tl.constexpr):
    """The positions of this program's block, as 64 bits: the last may be beyond 2^31."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


GRID = Grid(block=4096, num_warps=8)
DIGIT_BITS = 8  # of a magnitude counted in one pass of `kth_magnitude`


@triton.jit
def _hits(keys, threshold, inside):
    # not `>=`: a NaN must be a hit, and it is not less than anything
    return ~(tl.abs(keys) < tl.load(threshold)) & inside


@triton.jit
def _count(keys, threshold, counts, n, BLOCK: tl.constexpr):
    at = positions(BLOCK)
    hit = _hits(tl.load(keys + at, at < n, other=0), threshold, at < n)
    tl.store(counts + tl.program_id(0), tl.sum(hit.to(tl.int32), 0))


@triton.jit
def _add_count(residual, grad, acc, threshold, counts, n, BLOCK: tl.constexpr):
    """As _count on acc, after acc = residual + grad."""
    at = positions(BLOCK)
    total = tl.load(residual + at, at < n, other=0) + tl.load(grad + at, at < n, other=0)
    tl.store(acc + at, total, at < n)
    tl.store(counts + tl.program_id(0), tl.sum(_hits(total, threshold, at < n).to(tl.int32), 0))


@triton.jit
def _write(keys, threshold, x, ends, indices, values, capacity, n, BLOCK: tl.constexpr):
    """Write the hits of one block, which end before slot `ends` of that block."""
    at = positions(BLOCK)
    hit = _hits(tl.load(keys + at, at < n, other=0), threshold, at < n)
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
    """Count the digit at `shift` of all magnitudes that begin with the digits `prefix`."""
    at = positions(BLOCK)
    digits = (tl.load(bits + at, at < n, other=0) & MAGNITUDE) >> shift
    candidate = (at < n) & (digits // RADIX == prefix)
    digit = tl.where(candidate, digits % RADIX, 0).to(tl.int32)
    every_digit = tl.arange(0, RADIX)
    # Values that do not begin with the prefix are counted as digit 0, and subtracted again: a
    # histogram takes a mask only from Triton 3.4 on.
    num_others = BLOCK - tl.sum(candidate.to(tl.int32), 0)
    num = tl.histogram(digit, RADIX) - tl.where(every_digit == 0, num_others, 0)
    tl.atomic_add(counts + every_digit, num, num > 0)


def on_device(threshold: float, x: Tensor) -> Tensor:
    """A threshold in the dtype of x, as a tensor of one element on its device.

    Triton takes a Python float as 32 bits. Rounded by `to`, since `full` refuses what overflows.
    """
    return torch.full((), threshold, dtype=torch.float64, device=x.device).to(x.dtype)


def count_hits(keys: Tensor, threshold: Tensor) -> Tensor:
    """How many keys of every block reach the threshold."""
    counts = _new_counts(keys)
    GRID.launch(_count, keys.numel(), keys, threshold, counts)
    return counts


def write_hits(
    keys: Tensor, threshold: Tensor, x: Tensor, counts: Tensor, capacity: int
) -> tuple[Sparse, Tensor]:
    """The entries of x whose key reaches the threshold, in tensors of `capacity` entries.

    Also returns where each block ends in them. What is behind the last entry is uninitialised. The
    host does not wait.
    """
    n = x.numel()
    indices = torch.empty(capacity, dtype=torch.int32, device=x.device)
    values = x.new_empty(capacity)
    ends = counts.cumsum(0)
    GRID.launch(_write, n, keys, threshold, x, ends, indices, values, capacity)
    return Sparse(indices, values, n), ends


def compact(
    keys: Tensor, threshold: Tensor, x: Tensor, counts: Tensor, capacity: int
) -> tuple[Sparse, int]:
    """The entries of x whose key reaches the threshold, and how many there are. The host waits."""
    n = x.numel()
    written, ends = write_hits(keys, threshold, x, counts, min(capacity, n))
    count = int(ends[-1]) if n else 0
    num = min(count, written.num)
    return Sparse(written.indices[:num], written.values[:num], n), count


def _new_counts(x: Tensor) -> Tensor:
    return torch.empty(GRID.num_programs(x.numel()), dtype=torch.int32, device=x.device)


def kth_magnitude(x: Tensor, k: int) -> float:
    bits = x.view(INTEGER[x.dtype])
    magnitude = torch.iinfo(bits.dtype).max  # a mask of all bits but the sign

    def count_digits(prefix: int, shift: int, digit_bits: int) -> list[int]:
        radix = 1 << digit_bits
        counts = torch.zeros(radix, dtype=torch.int32, device=x.device)
        GRID.launch(_count_digits, x.numel(), bits, prefix, shift, counts, magnitude, radix)
        return counts.tolist()

    kth = kth_largest(k, 8 * bits.itemsize, DIGIT_BITS, count_digits)
    return from_bits(kth, x.dtype)


def select(x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]:
    level = on_device(threshold, x)
    return compact(x, level, x, count_hits(x, level), capacity)


def select_counted(x: Tensor, threshold: float, count: int) -> Sparse:
    level = on_device(threshold, x)
    return write_hits(x, level, x, count_hits(x, level), count)[0]


def accumulate_select(
    residual: Tensor,
    grad: Tensor,
    acc: Tensor,
    threshold: float,
    capacity: int,
    out: EntryBuffer | None = None,
    offset: int = 0,
) -> tuple[Sparse, int]:
    level, counts = on_device(threshold, acc), _new_counts(acc)
    GRID.launch(_add_count, acc.numel(), residual, grad, acc, level, counts)
    found, count = compact(acc, level, acc, counts, capacity)
    return placed(found, out, offset), count
