"""The kernels in plain torch: slow and clear, on any device. The other forms must equal these.

A device works on its own time, so where the host knows the size of a result it is not asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oktopk.sparse import EntryBuffer, Sparse, placed
from oktopk.utils.device import to_device, to_host

AT_ONCE = False  # what a kernel has found is not yet known when it returns


def all_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def least_magnitude(x: Tensor) -> float:
    return survey([], [[x]])[1][0]


def survey(sums: list[Tensor], groups: list[list[Tensor]]) -> tuple[bool, list[float]]:
    flags = [torch.isfinite(x).all() for x in sums]
    # by their bits, so that a NaN is the least only if there is nothing else
    least = [x.abs().view(INTEGER[x.dtype]).min() for group in groups for x in group]
    (finite, bits) = to_host(*(_stacked(part) for part in (flags, least)))
    dtypes = [x.dtype for group in groups for x in group]
    found = iter([bin_threshold(each, dtype) for each, dtype in zip(bits, dtypes, strict=True)])
    return all(finite), [min((next(found) for _ in group), default=0.0) for group in groups]


def _stacked(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.long() for part in parts]) if parts else torch.empty(0)


def histogram(x: Tensor, num: int) -> Tensor:
    """How often each of the integers from 0 on occurs, below `num`. Without a look at their range,
    which `bincount` has."""
    one = torch.ones((), dtype=torch.int32, device=x.device)
    return x.new_zeros(num, dtype=torch.int32).index_add_(0, x, one.expand(x.numel()))


def places(mask: Tensor, num: int) -> Tensor:
    """Where a mask has its `num` ones, ascending. `nonzero` would have to find out how many."""
    slots = torch.where(mask, mask.cumsum(0) - 1, num).clamp_(max=num)  # all zeros share the last
    numbers = torch.arange(mask.numel(), device=mask.device)
    return numbers.new_empty(num + 1).scatter_(0, slots, numbers)[:num]


def kth_magnitude(x: Tensor, k: int) -> float:
    return x.abs().kthvalue(x.numel() - k + 1).values.item()


def select(x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]:
    # not `>=`: a NaN must be selected, and it is not less than anything
    indices = (x.abs() < threshold).logical_not_().nonzero().squeeze(1)
    count = indices.numel()
    indices = indices[:capacity]
    return Sparse(indices.int(), x[indices], x.numel()), count


def take(x: Tensor, threshold: float, num: int) -> Sparse:
    where = places((x.abs() < threshold).logical_not_(), num)
    return Sparse(where.int(), x[where], x.numel())


def count_reaching(x: Tensor, thresholds: list[float]) -> Tensor:
    levels = to_device(thresholds, torch.float64, x.device).to(x.dtype)
    return (x.abs() < levels.unsqueeze(1)).logical_not_().sum(1, dtype=torch.int32)


BINS = 4096
PRECISION = 10  # bits of a magnitude that tell bins apart, beside the exponent
INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}
NUMPY = {torch.float32: (np.float32, np.int32), torch.float64: (np.float64, np.int64)}
MANTISSA = {torch.float32: 23, torch.float64: 52}


def trim(sparse: Sparse, low: float, k: int) -> tuple[Sparse, float]:
    bits = sparse.values.abs().view(INTEGER[sparse.values.dtype])
    start, shift = first_bin(low, sparse.values)
    bins = ((bits - start) >> shift).clamp_(max=BINS - 1)
    counts = histogram(bins, BINS)
    ((first, num),) = to_host(_threshold_bin(counts, k))
    where = places(bins >= first, num)
    kept = Sparse(sparse.indices[where], sparse.values[where], sparse.numel)
    return kept, bin_threshold(start + (first << shift), sparse.values.dtype)


def first_bin(low: float, values: Tensor) -> tuple[int, int]:
    """The bits of the lowest magnitude, and how many of them do not tell bins apart."""
    floating, integer = NUMPY[values.dtype]
    with np.errstate(over="ignore"):  # a large one becomes infinite
        level = floating(low)
    return int(level.view(integer)), MANTISSA[values.dtype] - PRECISION


def threshold_bin(counts: Tensor, k: int) -> int:
    """The first bin from which on there are k entries at most; none may be in it."""
    return int(_threshold_bin(counts, k)[0])


def _threshold_bin(counts: Tensor, k: int) -> Tensor:
    """That bin, and how many entries there are from it on."""
    num_from = torch.cat([counts.flip(0).cumsum(0).flip(0), counts.new_zeros(1)])
    first = (num_from > k).sum()
    return torch.cat([first.view(1), num_from.index_select(0, first.view(1))])


def bin_threshold(bits: int, dtype: torch.dtype) -> float:
    """The magnitude with these bits."""
    floating, integer = NUMPY[dtype]
    return integer(bits).view(floating).item()


def accumulate_select(
    residual: Tensor,
    grad: Tensor,
    acc: Tensor,
    threshold: float,
    capacity: int,
    into: EntryBuffer | None = None,
    base: int = 0,
) -> tuple[Sparse, int]:
    torch.add(residual, grad, out=acc)
    found, count = select(acc, threshold, capacity)
    return placed(found, into, base), count


def merge(indices: Tensor, values: Tensor, splits: list[int], lo: int, hi: int) -> Sparse:
    sums = values.new_zeros(hi - lo)
    touched = torch.zeros(hi - lo, dtype=torch.bool, device=values.device)
    # part by part: within one the indices are unique, so no addition depends on atomics
    for where, what in zip(indices.split(splits), values.split(splits), strict=True):
        at = where.long() - lo
        sums[at] += what
        touched[at] = True
    where = touched.nonzero().squeeze(1)
    return Sparse((where + lo).int(), sums[where], hi)


def settle_(
    grad: Tensor,
    residual: Tensor,
    result: Sparse,
    offered: Sparse,
    divisor: int,
    factor: float,
    base: int = 0,
) -> None:
    # by a tensor: by a number, CUDA multiplies with the reciprocal, which rounds twice
    quotients = result.values * factor / result.values.new_full((), divisor)
    grad.zero_()
    grad[result.indices.long() - base] = quotients.to(grad.dtype)
    if result.num:
        place = torch.searchsorted(result.indices, offered.indices).clamp_(max=result.num - 1)
        common = result.indices[place] == offered.indices
        taken = torch.where(common, offered.values * factor, 0)  # less 0 is the same, to the bit
        residual[offered.indices.long() - base] -= taken


def encode_indices(indices: Tensor, lo: int, low_bits: int, low: Tensor, high: Tensor) -> None:
    offsets, numbers = indices.long() - lo, torch.arange(len(indices), device=indices.device)
    _set_bits(low, numbers * low_bits, offsets & ((1 << low_bits) - 1))
    _set_bits(high, (offsets >> low_bits) + numbers, torch.ones_like(offsets))


def add_at_(x: Tensor, sparse: Sparse, factor: float, base: int = 0) -> None:
    x[sparse.indices.long() - base] += sparse.values * factor  # no index twice


def least(dtype: torch.dtype) -> float:
    """The smallest value that arrives as one: less may be flushed to 0, and its square is 0."""
    own = torch.finfo(dtype)
    return max(torch.finfo(torch.float32).smallest_normal, own.smallest_normal * own.eps)


class Late(NamedTuple):
    """One parameter's flat tensors for `take_late`, and its beta2."""

    grad: Tensor
    square: Tensor
    arrived: Tensor
    shares: Tensor
    beta: float


def arrives(grad: Tensor, found_inf: Tensor | None) -> Tensor:
    """Where a gradient has a value that counts. None has in a step that the scaler will skip."""
    comes = (grad.abs() < least(grad.dtype)).logical_not_()
    return comes if found_inf is None else comes & (found_inf == 0)


def take_late(
    late: list[Late], step: int, scale: float | Tensor, found_inf: Tensor | None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    if not late:
        return []
    comes = [arrives(each.grad, found_inf) for each in late]
    waited = [now & (each.arrived < step - 1) for each, now in zip(late, comes, strict=True)]
    # for all parameters at once: each of these two waits for the device
    counts = torch.stack([mask.sum() for mask in waited]).tolist()
    places = torch.cat(waited).nonzero().squeeze(1).split(counts)
    done, begin = [], 0
    for each, now, found in zip(late, comes, places, strict=True):
        where = found - begin
        begin += now.numel()
        age = step - each.arrived[where]
        each.arrived.masked_fill_(now, step)
        was, energy = each.square[where], (each.grad[where].float() / scale).square()
        share = each.shares[age.clamp(max=each.shares.numel() - 1).long()]
        after = each.beta * was.float() + energy * share
        before = (after - (1 - each.beta) * energy) / each.beta
        each.square[where] = before.clamp_(min=0).to(each.square.dtype)
        done.append((where, was, after.to(each.square.dtype)))
    return done


def decode_indices(low: Tensor, high: Tensor, lo: int, low_bits: int, out: Tensor) -> None:
    numbers = torch.arange(out.numel(), device=out.device)
    upper = places(_bits(high).view(-1), out.numel()) - numbers
    words = torch.cat([low, low.new_zeros(2)]).long() & ALL  # the last entry may end with its word
    start = numbers * low_bits
    pair = words[start >> 5] | (words[(start >> 5) + 1] << 32)
    lower = (pair >> (start & 31)) & ((1 << low_bits) - 1)
    out.copy_((upper << low_bits) + lower + lo)


ALL = (1 << 32) - 1  # the bits of a word


def _set_bits(words: Tensor, start: Tensor, values: Tensor) -> None:
    """Words of 32 bits in which each value stands from its bit `start` on; none meets another."""
    sums = torch.zeros(words.numel() + 2, dtype=torch.int64, device=words.device)
    shifted = values << (start & 31)
    sums.index_add_(0, start >> 5, shifted & ALL)  # in any order: bits that do not meet
    sums.index_add_(0, (start >> 5) + 1, shifted >> 32)
    words.copy_(sums[:-2])  # a value that ends with the last word has no bits beyond it


def _bits(words: Tensor) -> Tensor:
    """A row for each word, the lowest bit first."""
    where = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(1) >> where).bitwise_and_(1).bool()
