# SPDX-License-Identifier: Apache-2.0
"""The kernels for CPUs in numba: each runs on one core, without the GIL."""

from oktopk.kernels.cpu.ascent import ascend_within
from oktopk.kernels.cpu.elias_fano import decode_elias_fano, encode_elias_fano
from oktopk.kernels.cpu.magnitudes import (
    all_finite,
    count_at_least,
    finite_and_smallest,
    kth_magnitude,
    smallest_magnitude,
    trim,
)
from oktopk.kernels.cpu.quantization import dequantize, quantize
from oktopk.kernels.cpu.rice import decode_rice, encode_rice
from oktopk.kernels.cpu.second_moment import correct_second_moments_
from oktopk.kernels.cpu.selection import accumulate_select, select, select_counted
from oktopk.kernels.cpu.sums import add_at_, apply_result_, merge

SYNCHRONOUS: bool = True

__all__ = [
    "SYNCHRONOUS",
    "accumulate_select",
    "add_at_",
    "all_finite",
    "apply_result_",
    "ascend_within",
    "correct_second_moments_",
    "count_at_least",
    "decode_elias_fano",
    "decode_rice",
    "dequantize",
    "encode_elias_fano",
    "encode_rice",
    "finite_and_smallest",
    "kth_magnitude",
    "merge",
    "quantize",
    "select",
    "select_counted",
    "smallest_magnitude",
    "trim",
]
