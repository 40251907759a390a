# SPDX-License-Identifier: Apache-2.0
"""The check of indices that came from another rank, in numba."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.kernels.cpu.vector import compiled


@compiled
def _num_descents(indices):
    """How often an index is no larger than the one before. No early end: it compiles to vectors."""
    count = 0
    for i in range(1, indices.size):
        count += indices[i] <= indices[i - 1]
    return count


def ascend_within(indices: Tensor, lo: int, hi: int) -> Tensor:
    numbers = indices.numpy()
    if not numbers.size:
        return torch.tensor(True)
    return torch.tensor(bool(numbers[0] >= lo and numbers[-1] < hi) and not _num_descents(numbers))
