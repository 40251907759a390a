# SPDX-License-Identifier: Apache-2.0
"""The kernels in plain torch: slow and clear, on any device. The other backends must equal these.

A GPU works on its own time, and the host waits whenever it reads a number from it. So the host is
not made to ask for the size of a result that it knows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.kernels.backend import Correction, SecondMoment
from oktopk.kernels.float_bits import INTEGER, NUM_BINS, bins_from, cut_bin, from_bits
from oktopk.kernels.no_sync import histogram, nonzero_counted
from oktopk.kernels.reference_codes import ascend_within as ascend_within
from oktopk.kernels.reference_codes import decode_elias_fano as decode_elias_fano
from oktopk.kernels.reference_codes import decode_rice as decode_rice
from oktopk.kernels.reference_codes import dequantize as dequantize
from oktopk.kernels.reference_codes import encode_elias_fano as encode_elias_fano
from oktopk.kernels.reference_codes import encode_rice as encode_rice
from oktopk.kernels.reference_codes import quantize as quantize
from oktopk.sparse import EntryBuffer, Sparse, placed
from oktopk.utils.device import to_device, to_host

SYNCHRONOUS: bool = False


def all_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def smallest_magnitude(x: Tensor) -> float:
    return finite_and_smallest([], [[x]])[1][0]


def finite_and_smallest(sums: list[Tensor], groups: list[list[Tensor]]) -> tuple[bool, list[float]]:
    flags = [torch.isfinite(x).all() for x in sums]
    # compared as integers, in which a NaN is larger than everything else
    smallest = [x.abs().view(INTEGER[x.dtype]).min() for group in groups for x in group]
    finite, bits = to_host(_stacked(flags), _stacked(smallest))
    dtypes = [x.dtype for group in groups for x in group]
    found = iter([from_bits(each, dtype) for each, dtype in zip(bits, dtypes, strict=True)])
    return all(finite), [min((next(found) for _ in group), default=0.0) for group in groups]


def _stacked(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.long() for part in parts]) if parts else torch.empty(0)


def kth_magnitude(x: Tensor, k: int) -> float:
    return x.abs().kthvalue(x.numel() - k + 1).values.item()


def count_at_least(x: Tensor, thresholds: list[float]) -> Tensor:
    levels = to_device(thresholds, torch.float64, x.device).to(x.dtype)
    return _reaches(x, levels.unsqueeze(1)).sum(1, dtype=torch.int32)


def _reaches(x: Tensor, threshold: float | Tensor) -> Tensor:
    # not `>=`: a NaN must be selected, and it is not less than anything
    return (x.abs() < threshold).logical_not_()


def select(x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]:
    indices = _reaches(x, threshold).nonzero().squeeze(1)
    count = indices.numel()
    indices = indices[:capacity]
    return Sparse(indices.int(), x[indices], x.numel()), count


def select_counted(x: Tensor, threshold: float, count: int) -> Sparse:
    indices = nonzero_counted(_reaches(x, threshold), count)
    return Sparse(indices.int(), x[indices], x.numel())


def accumulate_select(
    residual: Tensor,
    grad: Tensor,
    acc: Tensor,
    threshold: float,
    capacity: int,
    out: EntryBuffer | None = None,
    offset: int = 0,
) -> tuple[Sparse, int]:
    torch.add(residual, grad, out=acc)
    found, count = select(acc, threshold, capacity)
    return placed(found, out, offset), count


def trim(sparse: Sparse, low: float, k: int) -> tuple[Sparse, float]:
    dtype = sparse.values.dtype
    bits = sparse.values.abs().view(INTEGER[dtype])
    start, shift = bins_from(low, dtype)
    bins = ((bits - start) >> shift).clamp_(max=NUM_BINS - 1)
    ((first, count),) = to_host(cut_bin(histogram(bins, NUM_BINS), k))
    kept = nonzero_counted(bins >= first, count)
    trimmed = Sparse(sparse.indices[kept], sparse.values[kept], sparse.numel)
    return trimmed, from_bits(start + (first << shift), dtype)


def merge(indices: Tensor, values: Tensor, splits: list[int], lo: int, hi: int) -> Sparse:
    sums = values.new_zeros(hi - lo)
    is_set = torch.zeros(hi - lo, dtype=torch.bool, device=values.device)
    # part by part: within one the indices are unique, so no addition depends on atomics
    for part_indices, part in zip(indices.split(splits), values.split(splits), strict=True):
        positions = part_indices.long() - lo
        sums[positions] += part
        is_set[positions] = True
    positions = is_set.nonzero().squeeze(1)
    return Sparse((positions + lo).int(), sums[positions], hi)


def apply_result_(
    grad: Tensor,
    residual: Tensor,
    result: Sparse,
    sent: Sparse,
    divisor: int,
    factor: float,
    offset: int = 0,
) -> None:
    # by a tensor: by a number, CUDA multiplies with the reciprocal, which rounds twice
    quotients = result.values * factor / result.values.new_full((), divisor)
    grad.zero_()
    grad[result.indices.long() - offset] = quotients.to(grad.dtype)
    if result.num:
        nearest = torch.searchsorted(result.indices, sent.indices).clamp_(max=result.num - 1)
        common = result.indices[nearest] == sent.indices
        applied = torch.where(common, sent.values * factor, 0)  # x - 0 has the bits of x
        residual[sent.indices.long() - offset] -= applied


def add_at_(x: Tensor, sparse: Sparse, factor: float, offset: int = 0) -> None:
    x[sparse.indices.long() - offset] += sparse.values * factor  # the indices are unique


def smallest_arrival(dtype: torch.dtype) -> float:
    """The smallest gradient of `dtype` that counts as one: a smaller one may be flushed to 0, and
    its square is 0 in float32."""
    own = torch.finfo(dtype)
    return max(torch.finfo(torch.float32).smallest_normal, own.smallest_normal * own.eps)


def arrival_mask(grad: Tensor, found_inf: Tensor | None) -> Tensor:
    """Where a gradient arrived in this step, as a mask.

    `found_inf` is the flag of a gradient scaler: if it is not 0, the optimizer's step is skipped,
    and nothing counts as arrived.
    """
    mask = _reaches(grad, smallest_arrival(grad.dtype))
    return mask if found_inf is None else mask & (found_inf == 0)


def correct_second_moments_(
    moments: list[SecondMoment], step: int, scale: float | Tensor, found_inf: Tensor | None
) -> list[Correction]:
    if not moments:
        return []
    arrived = [arrival_mask(m.grad, found_inf) for m in moments]
    late = [mask & (m.last_arrival < step - 1) for m, mask in zip(moments, arrived, strict=True)]
    # for all parameters at once, since the host waits for the device in each of these two lines
    counts = torch.stack([mask.sum() for mask in late]).tolist()
    flat_positions = torch.cat(late).nonzero().squeeze(1).split(counts)
    corrections, start = [], 0
    for m, mask, flat in zip(moments, arrived, flat_positions, strict=True):
        positions = flat - start
        start += mask.numel()
        age = step - m.last_arrival[positions]
        m.last_arrival.masked_fill_(mask, step)
        before = m.exp_avg_sq[positions]
        squares = (m.grad[positions].float() / scale).square()
        share = m.shares[age.clamp(max=m.shares.numel() - 1).long()]
        after = m.beta2 * before.float() + squares * share
        # what Adam's own update, beta2 * x + (1 - beta2) * squares, takes to `after`
        lowered = (after - (1 - m.beta2) * squares) / m.beta2
        m.exp_avg_sq[positions] = lowered.clamp_(min=0).to(m.exp_avg_sq.dtype)
        corrections.append(Correction(positions, before, after.to(m.exp_avg_sq.dtype)))
    return corrections
