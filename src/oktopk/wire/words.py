# SPDX-License-Identifier: Apache-2.0
"""The unit of every message: words of 32 bits, held in int32 tensors."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BYTES = 4
WORD_BITS = 8 * WORD_BYTES


def words_per_value(dtype: torch.dtype) -> int:
    """Words of one float32 or float64 value that is sent as it is."""
    return dtype.itemsize // WORD_BYTES


def words_for_bits(num_bits: int) -> int:
    """The fewest words that hold so many bits."""
    return -(-num_bits // WORD_BITS)


def as_words(values: Tensor) -> Tensor:
    """The bits of values of any dtype of at most 32 bits, padded with zeros to whole words.

    The result shares memory with `values` where nothing has to be padded or made contiguous.
    """
    per_word = WORD_BYTES // values.dtype.itemsize
    if missing := -values.numel() % per_word:
        values = torch.cat([values, values.new_zeros(missing)])
    return values.contiguous().view(torch.int32)
