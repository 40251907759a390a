# SPDX-License-Identifier: Apache-2.0
"""Entries to send: random and extreme ones."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from oktopk.wire import EntryRange

DTYPES = [torch.float32, torch.float64]
# values that a narrow dtype rounds, flushes to 0 or lets overflow, and block scales that vanish
EXTREME = [0.0, -0.0, 1.0, -1.0, 1 / 3, 65_504.0, 65_520.0, 3e38, -3e38, 1e-7, 1e-38, 1e-40, 1e-45]
NOT_FINITE = [math.nan, math.inf, -math.inf]
BITS = {"plain": 64, "fp32": 40, "bf16": 24, "fp16": 24, "int8": 16.2}  # per entry at 2 %, at most
BITS |= {"int4": 12, "int2": 10, "sign": 9}


@st.composite
def ranges(draw, max_count: int = 200) -> tuple[Tensor, EntryRange]:
    """Ascending indices, from none to all of a range, and the range."""
    lo = draw(st.sampled_from([0, 7, 2**20]))
    width = draw(st.sampled_from([1, 2, 31, 32, 33, 100, 5000, 2**30]))
    offsets = draw(st.sets(st.integers(0, width - 1), max_size=max_count))
    indices = torch.tensor(sorted(offsets), dtype=torch.int32) + lo
    return indices, EntryRange(len(indices), lo, lo + width)


@st.composite
def values(draw, count: int, dtype: torch.dtype) -> Tensor:
    """Random or extreme values: of one magnitude, of many, or all alike."""
    seed = draw(st.integers(0, 99))
    random = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    scales = draw(st.lists(st.sampled_from(EXTREME), min_size=1, max_size=9))
    return random * torch.tensor(scales, dtype=dtype).repeat(count)[:count]


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal to the bit, signs of zeros and NaNs included."""
    return x.dtype == y.dtype and x.view(torch.uint8).equal(y.view(torch.uint8))
