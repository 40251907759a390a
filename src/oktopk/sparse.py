"""`Sparse`: what a rank offers to the others and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sparse:
    """Some entries of a flat vector of `numel` elements.

    `indices` are int32, ascending and unique; `values` stand beside them. `indices` is None when
    every entry is there, so that the dense exchange needs no index at all.
    """

    indices: Tensor | None
    values: Tensor
    numel: int

    @property
    def num(self) -> int:
        """How many entries there are."""
        return self.values.numel()

    def to_dense(self) -> Tensor:
        """The flat vector, zero where nothing is stored. O(numel)."""
        if self.indices is None:
            return self.values.clone()
        dense = self.values.new_zeros(self.numel)
        dense[self.indices.long()] = self.values
        return dense


def acc_dtype(grad: Tensor) -> torch.dtype:
    """Residuals and sums are fp32; float64 for float64 gradients."""
    return torch.promote_types(grad.dtype, torch.float32)


Room = tuple[Tensor, Tensor]
"""Where indices and values of a selection go."""


def placed(sparse: Sparse, into: Room | None, base: int) -> Sparse:
    """The same entries with indices from `base` on, in the room for them if there is one."""
    assert sparse.indices is not None
    numel = base + sparse.numel
    if into is None:
        return Sparse(sparse.indices + base, sparse.values, numel)
    indices, values = (room[: sparse.num] for room in into)
    return Sparse(indices.copy_(sparse.indices + base), values.copy_(sparse.values), numel)


def first(sparse: Sparse, most: int) -> Sparse:
    """The first entries, at most `most`, as views."""
    assert sparse.indices is not None
    return Sparse(sparse.indices[:most], sparse.values[:most], sparse.numel)


def empty(numel: int, like: Tensor) -> Sparse:
    """No entry at all, in the dtype and on the device of `like`."""
    return Sparse(like.new_empty(0, dtype=torch.int32), like.new_empty(0), numel)
