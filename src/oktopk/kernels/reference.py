# SPDX-License-Identifier: Apache-2.0
"""The kernels in plain torch: slow and clear, on any device. The other backends must equal these.

A GPU works on its own time, and the host waits whenever it reads a number from it. So the host is
not made to ask for the size of a result that it knows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from oktopk.kernels.backend import Correction, SecondMoment
from oktopk.kernels.bits import (
    FIXED_POINT,
    INTEGER,
    LARGEST_BFLOAT16,
    LARGEST_INDEX,
    MAX_RICE_BITS,
    NAN_BITS,
    NUM_BINS,
    QUANTIZE_BLOCK,
    QUANTIZERS,
    RICE_BLOCK,
    Quantizer,
    bins_from,
    cut_bin,
    from_bits,
    histogram,
    nonzero_counted,
    num_blocks,
)
from oktopk.sparse import EntryBuffer, Sparse, placed
from oktopk.utils.device import to_device, to_host

# The codes of indices and values in plain torch: a part of `reference`, which imports it.


WORD_MASK = (1 << 32) - 1  # an int32 word, read as unsigned, in an int64


def encode_elias_fano(
    indices: Tensor, lo: int, num_low_bits: int, low: Tensor, high: Tensor
) -> None:
    offsets, numbers = indices.long() - lo, torch.arange(len(indices), device=indices.device)
    _write_bits(low, numbers * num_low_bits, offsets & ((1 << num_low_bits) - 1))
    _write_bits(high, (offsets >> num_low_bits) + numbers, torch.ones_like(offsets))


def decode_elias_fano(low: Tensor, high: Tensor, lo: int, num_low_bits: int, out: Tensor) -> None:
    numbers, ones = torch.arange(out.numel(), device=out.device), _unpacked_bits(high)
    upper = nonzero_counted(ones, out.numel()) - numbers
    lower = _read_bits(low, numbers * num_low_bits, (1 << num_low_bits) - 1)
    indices = (upper << num_low_bits) + lower + lo
    _fill_if(ones.sum() == out.numel(), indices, out)


def encode_rice(indices: Tensor, lo: int) -> Tensor:
    numbers = torch.arange(indices.numel(), device=indices.device)
    gaps = torch.diff(indices.long(), prepend=indices.new_full((1,), lo - 1).long()) - 1
    parameters = _rice_parameters(gaps)
    widths = parameters[numbers // RICE_BLOCK]
    quotients = gaps >> widths
    ((num_zeros, num_low_bits),) = to_host(torch.stack([quotients.sum(), widths.sum()]))
    num_bits = [8 * len(parameters), num_zeros + indices.numel(), num_low_bits]
    sizes = [-(-each // 32) for each in num_bits]
    words = torch.empty(sum(sizes), dtype=torch.int32, device=indices.device)
    head, high, low = words.split(sizes)
    _write_bits(head, torch.arange(len(parameters), device=indices.device) * 8, parameters)
    _write_bits(high, quotients.cumsum(0) + numbers, torch.ones_like(gaps))
    _write_bits(low, widths.cumsum(0) - widths, gaps & ((1 << widths) - 1))
    return words


def decode_rice(words: Tensor, lo: int, out: Tensor) -> None:
    num_parameters = num_blocks(out.numel(), RICE_BLOCK)
    num_head = -(-num_parameters // 4)
    if words.numel() < num_head:
        out.fill_(-1)
        return
    numbers = torch.arange(out.numel(), device=out.device)
    head, rest = words.split([num_head, words.numel() - num_head])
    told = _read_bits(head, torch.arange(num_parameters, device=out.device) * 8, 255)
    widths = told.clamp(max=MAX_RICE_BITS)[numbers // RICE_BLOCK]
    first_low = 32 * (rest.numel() - (widths.sum() + 31) // 32)
    ones = _unpacked_bits(rest)  # of the high bits, which come first, and of the low ones
    ones &= torch.arange(ones.numel(), device=out.device) < first_low
    is_whole = (told <= MAX_RICE_BITS).all() & (first_low >= 0) & (ones.sum() == out.numel())
    places = nonzero_counted(ones, out.numel())
    quotients = torch.diff(places, prepend=places.new_full((1,), -1)) - 1
    starts = (first_low + widths.cumsum(0) - widths).clamp_(min=0)
    gaps = (quotients << widths) + _read_bits(rest, starts, (1 << widths) - 1)
    _fill_if(is_whole, gaps.cumsum(0) + numbers + lo, out)


def ascend_within(indices: Tensor, lo: int, hi: int) -> Tensor:
    ascends = (indices[1:] > indices[:-1]).all()
    return ascends & (indices[:1] >= lo).all() & (indices[-1:] < hi).all()


def _fill_if(is_whole: Tensor, indices: Tensor, out: Tensor) -> None:
    """Write decoded indices; -1 instead of all if there were not as many or one is too large."""
    is_whole = is_whole & (indices[-1:] <= LARGEST_INDEX).all()
    out.copy_(torch.where(is_whole, indices, -1))


def _rice_parameters(gaps: Tensor) -> Tensor:
    """The parameter of each block that takes the fewest bits; the smallest of several.

    With one bit more, each gap has one more low bit, and all quotients together have
    `sum(ceil(quotient / 2))` fewer high bits. That sum falls as the parameter rises, so the best
    parameter is the number of those for which one bit more saves something.
    """
    num_rows, missing = num_blocks(gaps.numel(), RICE_BLOCK), -gaps.numel() % RICE_BLOCK
    rows = pad(gaps, (0, missing)).view(num_rows, RICE_BLOCK)
    lengths = pad(torch.ones_like(gaps), (0, missing)).view_as(rows).sum(1)
    parameters = torch.zeros_like(lengths)
    for bits in range(31):  # a gap has at most 31
        parameters += (((rows >> bits) + 1) >> 1).sum(1) > lengths
    return parameters


def quantize(values: Tensor, num_bits: int, parameters: Tensor, codes: Tensor) -> None:
    quantizer, count = QUANTIZERS[num_bits], values.numel()
    missing = -count % QUANTIZE_BLOCK
    signs = pad(values.signbit().long(), (0, missing))
    magnitudes = pad(values.abs(), (0, missing)).view(-(-count // QUANTIZE_BLOCK), QUANTIZE_BLOCK)
    is_value = pad(torch.ones_like(values, dtype=torch.bool), (0, missing)).view_as(magnitudes)
    fitted = _fit(magnitudes, is_value, quantizer).view(-1)
    rounded = fitted.clamp(max=LARGEST_BFLOAT16).to(torch.bfloat16)
    parameters.zero_()
    # which bits torch gives a NaN depends on the chip
    parameters.view(torch.int16)[: fitted.numel()] = torch.where(
        fitted.isnan(), NAN_BITS, rounded.view(torch.int16)
    )
    levels = _levels(rounded, quantizer)
    cuts = levels[:, :-1] * 0.5 + levels[:, 1:] * 0.5  # halved first: their sum may overflow
    nearest = (magnitudes.unsqueeze(2) >= cuts.unsqueeze(1)).sum(2).view(-1)
    numbers = torch.arange(count, device=values.device)
    _write_bits(codes, numbers * num_bits, (nearest | (signs << (num_bits - 1)))[:count])


def dequantize(parameters: Tensor, codes: Tensor, num_bits: int, out: Tensor) -> None:
    quantizer, numbers = QUANTIZERS[num_bits], torch.arange(out.numel(), device=out.device)
    sent = num_blocks(out.numel(), QUANTIZE_BLOCK) * quantizer.num_parameters
    levels = _levels(parameters.view(torch.bfloat16)[:sent], quantizer)
    code = _read_bits(codes, numbers * num_bits, (1 << num_bits) - 1)
    sign_bit = 1 << (num_bits - 1)
    magnitudes = levels[numbers // QUANTIZE_BLOCK, code & (sign_bit - 1)]
    out.copy_(torch.where(code < sign_bit, magnitudes, -magnitudes))


def _fit(magnitudes: Tensor, is_value: Tensor, quantizer: Quantizer) -> Tensor:
    """The parameters of each block, in float32; NaN for a block that has a NaN or Inf."""
    largest = magnitudes.amax(1, keepdim=True)
    smallest = torch.where(is_value, magnitudes, largest).amin(1, keepdim=True)
    if quantizer.cut is None:
        fitted = torch.cat([smallest, largest], 1)
    else:
        cut = smallest + (largest - smallest) * quantizer.cut
        shares = torch.where(largest > 0, magnitudes / largest, 0) * FIXED_POINT
        fixed = torch.where(largest.isfinite(), shares, 0).round().long()
        classes = [is_value & (magnitudes < cut), is_value & (magnitudes >= cut)]
        sums = torch.stack([(fixed * each).sum(1) for each in classes], 1)
        counts = torch.stack([each.sum(1) for each in classes], 1)
        means = sums.float() / counts.float() * (1 / FIXED_POINT) * largest
        # a lower class without values has the mean of the upper one
        means = torch.where(counts > 0, means, means[:, 1:])
        fitted = means[:, 2 - quantizer.num_parameters :]
    return torch.where(largest.isfinite(), fitted, torch.nan)


def _levels(parameters: Tensor, quantizer: Quantizer) -> Tensor:
    """The levels of each block as a row, in float32, from what was sent in bfloat16.

    They are rounded to bfloat16 too: with 8 bits of their own, what they leave of a value is exact.
    """
    ends = parameters.float().view(-1, quantizer.num_parameters)
    a, b = ends[:, :1], ends[:, -1:]
    fractions = to_device(list(quantizer.fractions), torch.float32, parameters.device)
    return (a + (b - a) * fractions).to(torch.bfloat16).float()


def _write_bits(words: Tensor, start: Tensor, values: Tensor) -> None:
    """Fill 32-bit words with values that begin at bit `start` each; no two have a bit in common."""
    sums = torch.zeros(words.numel() + 2, dtype=torch.int64, device=words.device)
    shifted = values << (start & 31)
    # adding sets the bits, since no two values share one; so the order does not matter either
    sums.index_add_(0, start >> 5, shifted & WORD_MASK)
    sums.index_add_(0, (start >> 5) + 1, shifted >> 32)
    words.copy_(sums[:-2])  # a value that ends with the last word has no bits beyond it


def _read_bits(words: Tensor, start: Tensor, mask: int | Tensor) -> Tensor:
    """The values that begin at bit `start` each, as int64; `mask` has ones for their bits."""
    # two words more, since the bits of the last value may end with the last word
    unsigned = torch.cat([words, words.new_zeros(2)]).long() & WORD_MASK
    pair = unsigned[start >> 5] | (unsigned[(start >> 5) + 1] << 32)
    return (pair >> (start & 31)) & mask


def _unpacked_bits(words: Tensor) -> Tensor:
    """All bits of the words as a flat mask, the lowest bit of each word first."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(1) >> shifts).bitwise_and_(1).bool().view(-1)


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
