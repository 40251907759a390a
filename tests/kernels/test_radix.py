# SPDX-License-Identifier: Apache-2.0
"""Radix selection finds the k-th largest of integers that it can only count."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.kernels.bits import kth_largest


def counting(numbers, calls=None):
    """A function that counts digits of a list of integers."""

    def count_digits(prefix: int, shift: int, digit_bits: int) -> np.ndarray:
        if calls is not None:
            calls.append((prefix, shift, digit_bits))
        radix = 1 << digit_bits
        counted = [n >> shift & radix - 1 for n in numbers if n >> shift + digit_bits == prefix]
        return np.bincount(np.array(counted, dtype=np.int64), minlength=radix)

    return count_digits


@given(
    numbers=st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 9), min_size=1, max_size=40),
    digit_bits=st.sampled_from([1, 3, 8, 16]),
    data=st.data(),
)
@settings(deadline=None)
def test_it_is_the_kth_of_the_sorted_numbers(numbers, digit_bits, data):
    k = data.draw(st.integers(1, len(numbers)))
    found = kth_largest(k, 31, digit_bits, counting(numbers))
    assert found == sorted(numbers, reverse=True)[k - 1]


@pytest.mark.parametrize("numbers", [[], [7], [7, 0, 300]])
def test_it_is_zero_when_there_are_fewer_than_k(numbers):
    assert kth_largest(len(numbers) + 1, 16, 8, counting(numbers)) == 0


def test_the_last_digit_has_the_bits_that_are_left():
    calls = []
    assert kth_largest(1, 31, 16, counting([0x7F801234], calls)) == 0x7F801234
    assert calls == [(0, 15, 16), (0x7F801234 >> 15, 0, 15)]


def test_counts_may_be_a_list():
    assert kth_largest(2, 2, 2, lambda prefix, shift, digit_bits: [5, 0, 1, 1]) == 2
