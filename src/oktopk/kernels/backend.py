# SPDX-License-Identifier: Apache-2.0
"""`KernelBackend`: the functions that every implementation of the kernels has."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from oktopk.sparse import EntryBuffer, Sparse


class SecondMoment(NamedTuple):
    """One parameter whose second moment of Adam is corrected, as flat tensors of equal length."""

    grad: Tensor
    """The average that the optimizer is about to apply; 0 where nothing arrived in this step."""

    exp_avg_sq: Tensor
    """Adam's second moment. It is changed in place."""

    last_arrival: Tensor
    """int32: the step in which each entry last arrived. It is changed in place."""

    shares: Tensor
    """float32, by the age of an entry in steps: the share of its square that Adam is to take in."""

    beta2: float


class Correction(NamedTuple):
    """The entries of one parameter whose second moment was corrected, in ascending order."""

    positions: Tensor
    """int64."""

    before: Tensor
    """The second moments as they were, to restore them if the optimizer's step fails."""

    after: Tensor
    """The second moments as they shall be after the optimizer's step."""


class KernelBackend(Protocol):
    """What a module of kernels has to define: `reference`, `cpu` and `cuda` do.

    The functions of the same names in `oktopk.kernels` say what each one does. All backends give
    the same bits; `tests/kernels` compares them with `reference`.
    """

    SYNCHRONOUS: bool
    """Whether the host knows a kernel's results when the kernel returns. On a GPU it has to wait
    for them, so callers avoid to ask."""

    def all_finite(self, x: Tensor) -> bool: ...

    def smallest_magnitude(self, x: Tensor) -> float: ...

    def finite_and_smallest(
        self, sums: list[Tensor], groups: list[list[Tensor]]
    ) -> tuple[bool, list[float]]: ...

    def kth_magnitude(self, x: Tensor, k: int) -> float: ...

    def count_at_least(self, x: Tensor, thresholds: list[float]) -> Tensor: ...

    def select(self, x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]: ...

    def select_counted(self, x: Tensor, threshold: float, count: int) -> Sparse: ...

    def accumulate_select(
        self,
        residual: Tensor,
        grad: Tensor,
        acc: Tensor,
        threshold: float,
        capacity: int,
        out: EntryBuffer | None = None,
        offset: int = 0,
    ) -> tuple[Sparse, int]: ...

    def trim(self, sparse: Sparse, low: float, k: int) -> tuple[Sparse, float]: ...

    def merge(
        self, indices: Tensor, values: Tensor, splits: list[int], lo: int, hi: int
    ) -> Sparse: ...

    def apply_result_(
        self,
        grad: Tensor,
        residual: Tensor,
        result: Sparse,
        sent: Sparse,
        divisor: int,
        factor: float,
        offset: int = 0,
    ) -> None: ...

    def add_at_(self, x: Tensor, sparse: Sparse, factor: float, offset: int = 0) -> None: ...

    def correct_second_moments_(
        self,
        moments: list[SecondMoment],
        step: int,
        scale: float | Tensor,
        found_inf: Tensor | None,
    ) -> list[Correction]: ...

    def encode_elias_fano(
        self, indices: Tensor, lo: int, num_low_bits: int, low: Tensor, high: Tensor
    ) -> None: ...

    def decode_elias_fano(
        self, low: Tensor, high: Tensor, lo: int, num_low_bits: int, out: Tensor
    ) -> None: ...

    def encode_rice(self, indices: Tensor, lo: int) -> Tensor: ...

    def decode_rice(self, words: Tensor, lo: int, out: Tensor) -> None: ...

    def ascend_within(self, indices: Tensor, lo: int, hi: int) -> Tensor: ...

    def quantize(
        self, values: Tensor, num_bits: int, parameters: Tensor, codes: Tensor
    ) -> None: ...

    def dequantize(self, parameters: Tensor, codes: Tensor, num_bits: int, out: Tensor) -> None: ...
