# SPDX-License-Identifier: Apache-2.0
"""The kernels for CPUs in numba: each runs on one core, without the GIL."""

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
    finite_and_smallest,
    kth_magnitude,
    select,
    select_counted,
    smallest_magnitude,
    trim,
)
from oktopk.kernels.cpu.sums import add_at_, apply_result_, correct_second_moments_, merge

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
