# SPDX-License-Identifier: Apache-2.0
"""A call of every kernel for CPUs, on a few values: what has Numba compile or load all of them.

They are called as everybody calls them, through the functions that give them their arguments, so
they are compiled for exactly the types that they will be used with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from oktopk.kernels.backend import SecondMoment
from oktopk.kernels.bits import QUANTIZE_BLOCK, QUANTIZERS
from oktopk.kernels.cpu.codes import (
    ascend_within,
    decode_elias_fano,
    decode_rice,
    dequantize,
    encode_elias_fano,
    encode_rice,
    quantize,
)
from oktopk.kernels.cpu.selection import (
    accumulate_select,
    all_finite,
    count_at_least,
    kth_magnitude,
    select,
    smallest_magnitude,
    trim,
)
from oktopk.kernels.cpu.sums import _merge as a_kernel
from oktopk.kernels.cpu.sums import add_at_, apply_result_, correct_second_moments_, merge
from oktopk.sparse import Sparse

Call = Callable[[], object]


def calls(dtype: torch.dtype) -> list[Call]:
    """Calls of all kernels that sums of a dtype, float32 or float64, need."""
    return [*_calls_on_sums(dtype), *_calls_on_messages(), _call_on_moments()]


def _calls_on_sums(dtype: torch.dtype) -> list[Call]:
    x = torch.linspace(-1, 1, 100, dtype=dtype)
    indices = torch.arange(100, dtype=torch.int32)
    many, few = (Sparse(indices[:num], x[:num], 100) for num in (50, 2))
    bfloat16 = x.to(torch.bfloat16)
    return [
        lambda: all_finite(x),
        lambda: smallest_magnitude(x),
        lambda: kth_magnitude(x, 3),
        lambda: count_at_least(x, [0.5]),
        lambda: accumulate_select(x, x, x.clone(), 0.5, 100),
        lambda: select(x, 0.5, 100),
        lambda: trim(Sparse(indices.clone(), x + 2, 100), 1.0, 10),
        lambda: merge(many.indices, many.values, [many.num], 0, 100),
        # an algorithm for many entries, one for few, and one for gradients of fewer bits
        lambda: apply_result_(x.clone(), x.clone(), many, many, 2, 1.0),
        lambda: apply_result_(x.clone(), x.clone(), few, few, 2, 1.0),
        lambda: apply_result_(bfloat16, x.clone(), few, few, 2, 1.0),
        lambda: add_at_(x.clone(), few, 1.0),
    ]


def _calls_on_messages() -> list[Call]:
    """Messages have int32 indices, and values that are float32 before they get fewer bits."""
    indices, out = (torch.tensor([3, 9], dtype=torch.int32) for _ in range(2))
    low, high = torch.zeros(2, 1, dtype=torch.int32)
    values, num_bits = torch.linspace(-1, 1, QUANTIZE_BLOCK), max(QUANTIZERS)
    parameters = torch.zeros(1, dtype=torch.int32)  # two in bfloat16
    codes = torch.zeros(QUANTIZE_BLOCK * num_bits // 32, dtype=torch.int32)
    return [
        lambda: encode_elias_fano(indices, 0, 3, low, high),
        lambda: decode_elias_fano(low, high, 0, 3, out),
        lambda: decode_rice(encode_rice(indices, 0), 0, out),
        lambda: ascend_within(indices, 0, 100),
        lambda: quantize(values, num_bits, parameters, codes),
        lambda: dequantize(parameters, codes, num_bits, values),
    ]


def _call_on_moments() -> Call:
    """Adam's second moment is corrected in float32."""
    moment = SecondMoment(
        grad=torch.ones(8),
        exp_avg_sq=torch.ones(8),
        last_arrival=torch.zeros(8, dtype=torch.int32),
        shares=torch.ones(16),
        beta2=0.99,
    )
    return lambda: correct_second_moments_([moment], 9, 1.0, None)


def cache_path() -> str | None:
    """The folder in which Numba keeps what it compiles; None if it may not write anywhere, or
    compiles nothing (NUMBA_DISABLE_JIT)."""
    stats = getattr(a_kernel, "stats", None)  # a plain function has none
    return None if stats is None else stats.cache_path
