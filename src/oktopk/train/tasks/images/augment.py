# SPDX-License-Identifier: Apache-2.0
"""Random shifts and flips of training images, as is usual for CIFAR-10."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

SHIFT_BITS = 16
"""Bits of the hash for each of the two shifts; the bit above them decides about the flip."""


def augment(images: Tensor, bits: np.ndarray, crop: int, flip: bool) -> Tensor:
    """Shift each image by up to `crop` pixels with zeros around, and mirror half of them.

    `bits` are 64 random bits for each image, uint64.
    """
    height, width = images.shape[2:]
    padded = pad(images, [crop] * 4)
    result = torch.empty_like(images)
    for i, word in enumerate(bits.tolist()):
        top, left = ((word >> shift) % 2**SHIFT_BITS % (2 * crop + 1) for shift in (0, SHIFT_BITS))
        window = padded[i, :, top : top + height, left : left + width]
        is_mirrored = flip and word >> 2 * SHIFT_BITS & 1
        result[i] = window.flip(-1) if is_mirrored else window
    return result
