# SPDX-License-Identifier: Apache-2.0
"""`Sparse`: some entries of a flat vector, which is what ranks exchange."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sparse:
    """Some entries of a flat vector of `numel` elements."""

    indices: Tensor
    """int32, ascending and unique."""

    values: Tensor
    numel: int

    @property
    def num(self) -> int:
        """The number of entries."""
        return self.values.numel()

    def to_dense(self) -> Tensor:
        """The flat vector, zero where nothing is stored. O(numel)."""
        dense = self.values.new_zeros(self.numel)
        dense[self.indices.long()] = self.values
        return dense


def acc_dtype(grad: Tensor) -> torch.dtype:
    """Residuals and sums are fp32; float64 for float64 gradients."""
    return torch.promote_types(grad.dtype, torch.float32)


def common_acc_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """That of a flat vector with the sums of all of them, whose dtypes may differ."""
    return reduce(torch.promote_types, map(acc_dtype, tensors), torch.float32)


EntryBuffer = tuple[Tensor, Tensor]
"""Memory for the indices and the values of a selection."""


def placed(sparse: Sparse, out: EntryBuffer | None, offset: int) -> Sparse:
    """The same entries with `offset` added to their indices, in the buffer if one is given."""
    numel = offset + sparse.numel
    if out is None:
        return Sparse(sparse.indices + offset, sparse.values, numel)
    indices, values = (part[: sparse.num] for part in out)
    return Sparse(indices.copy_(sparse.indices + offset), values.copy_(sparse.values), numel)


def first(sparse: Sparse, most: int) -> Sparse:
    """The first entries, at most `most`, as views."""
    return Sparse(sparse.indices[:most], sparse.values[:most], sparse.numel)


def empty(numel: int, like: Tensor) -> Sparse:
    """A selection without entries, in the dtype and on the device of `like`."""
    return Sparse(like.new_empty(0, dtype=torch.int32), like.new_empty(0), numel)
