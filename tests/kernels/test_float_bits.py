# SPDX-License-Identifier: Apache-2.0
"""Magnitudes as integers, and the bins of magnitude in which `trim` counts."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.kernels.bits import NUM_BINS, bins_from, cut_bin, from_bits, to_bits

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@given(a=st.floats(0, width=32), b=st.floats(0, width=32))
@settings(deadline=None)
def test_bits_order_as_magnitudes_do_and_come_back(dtype, a, b):
    assert (to_bits(a, dtype) < to_bits(b, dtype)) == (a < b)
    assert from_bits(to_bits(a, dtype), dtype) == a


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_is_above_all_numbers_and_nan_above_infinity(dtype):
    largest = to_bits(torch.finfo(dtype).max, dtype)
    assert largest < to_bits(math.inf, dtype) < to_bits(math.nan, dtype)
    assert to_bits(1e39, torch.float32) == to_bits(math.inf, torch.float32)
    assert math.isnan(from_bits(to_bits(math.nan, dtype), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bin_is_a_tenth_of_a_percent_wide(dtype):
    start, shift = bins_from(0.5, dtype)
    edges = [from_bits(start + (bin_ << shift), dtype) for bin_ in range(NUM_BINS + 1)]
    assert edges[0] == 0.5 and edges[-1] == 8
    assert all(low < high < low * 1.001 for low, high in pairwise(edges))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(0, 30))
@settings(deadline=None)
def test_the_cut_is_the_lowest_bin_with_at_most_k_entries_from_it_on(counts, k):
    first, num = cut_bin(torch.tensor(counts), k).tolist()
    assert num == sum(counts[first:]) <= k
    assert first == 0 or sum(counts[first - 1 :]) > k
