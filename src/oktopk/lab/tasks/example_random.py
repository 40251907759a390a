# SPDX-License-Identifier: Apache-2.0
"""Random numbers for examples, from a hash: a generator for each example would take longer."""

from __future__ import annotations

import numpy as np

# the increment and the factors of splitmix64 (Steele, Lea and Flood 2014)
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def random_bits(seed: int, epoch: int, indices: list[int], stream: int = 0) -> np.ndarray:
    """64 random bits for each example, uint64. They depend on all arguments and on nothing else.

    Different streams are for independent choices about the same example.
    """
    state = np.asarray(indices, np.uint64)
    for part in (stream, epoch, seed):
        state = _mix(state) + np.uint64(part)  # unsigned integers of arrays wrap around
    return _mix(state)


def _mix(state: np.ndarray) -> np.ndarray:
    """The output function of splitmix64: a bijection in which every bit depends on all others."""
    state = state + _INCREMENT
    state = (state ^ (state >> _SHIFTS[0])) * _FACTORS[0]
    state = (state ^ (state >> _SHIFTS[1])) * _FACTORS[1]
    return state ^ (state >> _SHIFTS[2])
