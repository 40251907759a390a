# SPDX-License-Identifier: Apache-2.0
"""Candidates: entries found in the same pass that adds the gradient to the residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.sparse import EntryBuffer, Sparse, first, placed


@dataclass(slots=True)
class Candidates:
    """Entries that reached a threshold somewhat below the one that k entries should reach.

    A group of buckets arrives bucket by bucket, so `add_bucket` is called once per bucket.
    """

    threshold: float
    capacity: int
    """Entries that are stored at most."""

    buffer: EntryBuffer
    """Indices and values of all buckets so far, one bucket after the other."""

    numel: int = 0
    """Number of elements seen so far."""

    num: int = 0
    """Entries stored."""

    num_reaching: int = 0
    """Entries that reached the threshold, stored or not."""

    def add_bucket(self, residual: Tensor, grad: Tensor, acc: Tensor) -> None:
        """Set `acc = residual + grad` and store the entries of it that reach the threshold."""
        if not kernels.is_synchronous(acc):  # `find_in` will: one launch instead of one per bucket
            torch.add(residual, grad, out=acc)
            return
        parts = kernels.thread_slices(acc)
        if len(parts) == 1:
            self._append(*self._find(residual, grad, acc, self._free))
            return
        found = kernels.run_in_threads(
            lambda part: self._find(residual[part], grad[part], acc[part], None), parts
        )
        for sparse, num_reaching in found:
            # the threads do not know of each other: each may have found as many as fit in all
            fitting = first(sparse, self.capacity - self.num)
            self._append(placed(fitting, self._free, self.numel), num_reaching)

    def find_in(self, acc: Tensor) -> None:
        """Find the candidates in the whole of `acc`, unless `add_bucket` already has."""
        if not kernels.is_synchronous(acc):
            found, self.num_reaching = kernels.select(acc, self.threshold, self.capacity)
            self.buffer = found.indices, found.values
            self.num, self.numel = found.num, found.numel

    @property
    def entries(self) -> Sparse:
        """The stored entries."""
        indices, values = self.buffer
        return Sparse(indices[: self.num], values[: self.num], self.numel)

    @property
    def _free(self) -> EntryBuffer:
        return self.buffer[0][self.num :], self.buffer[1][self.num :]

    def _find(
        self, residual: Tensor, grad: Tensor, acc: Tensor, out: EntryBuffer | None
    ) -> tuple[Sparse, int]:
        offset = 0 if out is None else self.numel
        left = self.capacity - self.num
        return kernels.accumulate_select(residual, grad, acc, self.threshold, left, out, offset)

    def _append(self, found: Sparse, num_reaching: int) -> None:
        self.num, self.numel = self.num + found.num, found.numel
        self.num_reaching += num_reaching
