# SPDX-License-Identifier: Apache-2.0
"""What the kernels of all backends share: magnitudes as integers, radix selection, constants
of codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

# Magnitudes as integers: without the sign, the bits of floating-point numbers order as they do.


INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}
NUMPY = {torch.float32: (np.float32, np.int32), torch.float64: (np.float64, np.int64)}
MANTISSA_BITS = {torch.float32: 23, torch.float64: 52}

NUM_BINS = 4096
BIN_MANTISSA_BITS = 10  # of a magnitude, beside its exponent, that tell bins apart


def to_bits(value: float, dtype: torch.dtype) -> int:
    """The bits of a number in `dtype`, as an integer of the same width."""
    floating, integer = NUMPY[dtype]
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        return int(floating(value).view(integer))


def from_bits(bits: int, dtype: torch.dtype) -> float:
    """The number of `dtype` that has these bits. Computed on the host, without a device."""
    floating, integer = NUMPY[dtype]
    return integer(bits).view(floating).item()


def bins_from(low: float, dtype: torch.dtype) -> tuple[int, int]:
    """The bins of `trim` for magnitudes of at least `low`: (bits of the first bin, shift).

    A magnitude is in bin `(its bits - bits of the first bin) >> shift`, so a bin is a range of
    magnitudes that differ by about 0.1 %. The last bin has all larger magnitudes too.
    """
    return to_bits(low, dtype), MANTISSA_BITS[dtype] - BIN_MANTISSA_BITS


def cut_bin(counts: Tensor, k: int) -> Tensor:
    """The lowest bin from which on there are at most k entries, and how many there are.

    A tensor of two integers on the device of `counts`. The bin is `len(counts)` if even the last
    one has more than k.
    """
    num_from = torch.cat([counts.flip(0).cumsum(0).flip(0), counts.new_zeros(1)])
    first = (num_from > k).sum()
    return torch.cat([first.view(1), num_from.index_select(0, first.view(1))])


# Radix selection: the k-th largest integer, digit by digit, by counting and without sorting.
#
# The bits of a magnitude, read as an integer, order floating-point numbers as their magnitudes do.
# One round counts how often each value of the highest digit occurs. The counts tell which digit
# the k-th largest number has, and its rank among the numbers that share this digit. The next round
# counts the next digit of those numbers alone. Where the numbers are does not matter as long as
# they can be counted: in an array, on a GPU, or spread over all ranks.


class CountDigits(Protocol):
    """Counts one digit of all numbers that begin with the digits found so far."""

    def __call__(self, prefix: int, shift: int, digit_bits: int) -> Sequence[int] | np.ndarray:
        """How often each of the `2 ** digit_bits` values of the digit occurs.

        The digit of a number is `(number >> shift) % 2 ** digit_bits`. Only numbers with
        `number >> (shift + digit_bits) == prefix` are counted.
        """
        ...


def kth_largest(k: int, num_bits: int, digit_bits: int, count_digits: CountDigits) -> int:
    """The k-th largest of the non-negative integers of `num_bits` bits that are counted.

    Digits have `digit_bits` bits; the last one has what is left. Returns 0 if there are fewer than
    k numbers.
    """
    prefix, shift = 0, num_bits
    while shift > 0:
        width = min(digit_bits, shift)
        shift -= width
        digit, k = _digit_of_kth(np.asarray(count_digits(prefix, shift, width)), k)
        prefix = prefix << width | digit
    return prefix


def _digit_of_kth(counts: np.ndarray, k: int) -> tuple[int, int]:
    """The digit of the k-th largest number, and its rank among those that share the digit."""
    num_from_top = np.cumsum(counts[::-1])
    place = min(int(np.searchsorted(num_from_top, k)), len(counts) - 1)
    num_above = int(num_from_top[place] - counts[::-1][place])
    return len(counts) - 1 - place, k - num_above


# Operations of torch whose result size the caller knows, so the host need not wait for a device.
#
# They run on every device, in plain torch.


def histogram(x: Tensor, num_bins: int) -> Tensor:
    """How often each integer from 0 to `num_bins - 1` occurs in x, int32. O(n).

    x may have no other integers. `torch.bincount` would wait for the device to learn their range.
    """
    one = torch.ones((), dtype=torch.int32, device=x.device)
    return x.new_zeros(num_bins, dtype=torch.int32).index_add_(0, x, one.expand(x.numel()))


def nonzero_counted(mask: Tensor, count: int) -> Tensor:
    """The positions where a flat mask is true, ascending, int64, when there are `count`. O(n).

    `torch.nonzero` would wait for the device to learn how many there are.
    """
    # every true position goes to its slot, all false ones to an extra slot behind the last
    slots = torch.where(mask, mask.cumsum(0) - 1, count).clamp_(max=count)
    positions = torch.arange(mask.numel(), device=mask.device)
    return positions.new_empty(count + 1).scatter_(0, slots, positions)[:count]


# What the codes that work block by block are made of: the constants that all backends share.


RICE_BLOCK = 64
"""Gaps that share one Rice parameter. On gradients of real training smaller blocks save no more
than the parameters cost, and larger ones follow the density less closely (benchmarks/codecs.py)."""

MAX_RICE_BITS = 31
"""The largest Rice parameter: a gap between two int32 indices has no more bits."""

LARGEST_INDEX = 2**31 - 1
"""What int32 holds at most; no vector is so long that this is an index in it."""

QUANTIZE_BLOCK = 128
"""Values that share one set of levels."""

LARGEST_BFLOAT16: float = torch.finfo(torch.bfloat16).max
NAN_BITS = 0x7FC0
"""A NaN in bfloat16."""

FIXED_POINT = 2.0**20
"""Magnitudes are added up as integers, in units of the largest one of their block over this. The
sum of integers has the same bits in whatever order it is taken."""


class Quantizer(NamedTuple):
    """How magnitudes of one block become a few levels: `a + (b - a) * fraction`, in bfloat16.

    Levels lie above the smallest magnitude a that was selected, and most magnitudes lie close to
    it. So levels that begin at 0 and have equal steps, as those of integers do, would waste most
    of the codes.
    """

    fractions: tuple[float, ...]
    """One for each level, ascending."""

    num_parameters: int
    """Numbers in bfloat16 that are sent for each block: b alone (then a is b), or a and b."""

    cut: float | None
    """Where the range of magnitudes is cut into a lower and an upper class, whose means are a and
    b, as a fraction of the range. None if a and b are the smallest and the largest magnitude."""


QUANTIZERS = {
    1: Quantizer((0.0,), num_parameters=1, cut=0.0),
    2: Quantizer((0.0, 1.0), num_parameters=2, cut=0.3),
    4: Quantizer(tuple(((j + 0.5) / 8) ** 1.5 for j in range(8)), num_parameters=2, cut=None),
}
"""By the number of bits of a value, one of which is its sign."""


def num_blocks(count: int, block: int) -> int:
    """Blocks of `count` values, the last of which may be shorter."""
    return -(-count // block)
