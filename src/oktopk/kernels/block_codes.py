# SPDX-License-Identifier: Apache-2.0
"""What the codes that work block by block are made of: the constants that all backends share."""

from __future__ import annotations

from typing import NamedTuple

import torch

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
