"""How a `Sparse` becomes bytes.

The plain form is one int32 row per entry: the index, then the bits of the value (one word for
float32, two for float64). Rows of one selection ascend, so a run of rows is a message as it stands
and nothing is copied together per peer. Indices never pass through a float.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.sparse import Sparse

WORD = 4  # bytes


def words_per_value(dtype: torch.dtype) -> int:
    return dtype.itemsize // WORD


def pack(sparse: Sparse) -> Tensor:
    """Rows of (index, value bits). O(num)."""
    assert sparse.indices is not None
    words = words_per_value(sparse.values.dtype)
    bits = sparse.values.view(torch.int32).view(sparse.num, words)
    return torch.cat([sparse.indices.unsqueeze(1), bits], dim=1)


def unpack(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Indices and values of packed rows, bit for bit. O(num)."""
    # a copy even of a single row: its values must be aligned to be read as another type
    values = rows[:, 1:].clone(memory_format=torch.contiguous_format).view(dtype).view(-1)
    return rows[:, 0].contiguous(), values
