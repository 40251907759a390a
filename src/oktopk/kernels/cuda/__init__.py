# SPDX-License-Identifier: Apache-2.0
"""The kernels for GPUs in Triton; with TRITON_INTERPRET=1 they run on CPU tensors as well.

Where a kernel of our own would be no faster, the one in plain torch is used. Rice codes
and low-bit values have no kernels in Triton yet: they too run in plain torch.
"""

from oktopk.kernels.cuda.selection import accumulate_select, kth_magnitude, select, select_counted
from oktopk.kernels.cuda.sums import apply_result_, decode_elias_fano, encode_elias_fano, merge
from oktopk.kernels.reference import (
    add_at_,
    all_finite,
    ascend_within,
    correct_second_moments_,
    count_at_least,
    decode_rice,
    dequantize,
    encode_rice,
    finite_and_smallest,
    quantize,
    smallest_magnitude,
    trim,
)

SYNCHRONOUS: bool = False

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
