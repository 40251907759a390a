# SPDX-License-Identifier: Apache-2.0
"""Magnitudes as integers: without the sign, the bits of floating-point numbers order as they do."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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
