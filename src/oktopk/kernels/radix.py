# SPDX-License-Identifier: Apache-2.0
"""Radix selection: the k-th largest integer, digit by digit, by counting and without sorting.

The bits of a magnitude, read as an integer, order floating-point numbers as their magnitudes do.
One round counts how often each value of the highest digit occurs. The counts tell which digit the
k-th largest number has, and its rank among the numbers that share this digit. The next round counts
the next digit of those numbers alone. Where the numbers are does not matter as long as they can be
counted: in an array, on a GPU, or spread over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


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
