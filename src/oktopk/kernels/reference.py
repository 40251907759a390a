"""The kernels in plain torch: slow and clear, on any device. The other forms must equal these."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oktopk.sparse import Room, Sparse, placed


def all_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def least_magnitude(x: Tensor) -> float:
    return x.abs().view(INTEGER[x.dtype]).min().view(x.dtype).item()  # no NaN, if there is another


def kth_magnitude(x: Tensor, k: int) -> float:
    return x.abs().kthvalue(x.numel() - k + 1).values.item()


def select(x: Tensor, threshold: float, capacity: int) -> tuple[Sparse, int]:
    # not `>=`: a NaN must be selected, and it is not less than anything
    indices = (x.abs() < threshold).logical_not_().nonzero().squeeze(1)
    count = indices.numel()
    indices = indices[:capacity]
    return Sparse(indices.int(), x[indices], x.numel()), count


def count_reaching(x: Tensor, thresholds: list[float]) -> list[int]:
    levels = torch.tensor(thresholds, dtype=torch.float64).to(x)
    return (x.abs() < levels.unsqueeze(1)).logical_not_().sum(1).tolist()


BINS = 4096
PRECISION = 10  # bits of a magnitude that tell bins apart, beside the exponent
INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}
MANTISSA = {torch.float32: 23, torch.float64: 52}


def trim(sparse: Sparse, low: float, k: int) -> tuple[Sparse, float]:
    assert sparse.indices is not None
    bits = sparse.values.abs().view(INTEGER[sparse.values.dtype])
    start, shift = first_bin(low, sparse.values)
    bins = ((bits - start) >> shift).clamp_(max=BINS - 1)
    counts = torch.bincount(bins, minlength=BINS).cpu()
    first = threshold_bin(counts, k)
    keep = bins >= first
    kept = Sparse(sparse.indices[keep], sparse.values[keep], sparse.numel)
    return kept, bin_threshold(start + (first << shift), sparse.values.dtype)


def first_bin(low: float, values: Tensor) -> tuple[int, int]:
    """The bits of the lowest magnitude, and how many of them do not tell bins apart."""
    level = torch.tensor(low, dtype=torch.float64).to(values.dtype)
    shift = MANTISSA[values.dtype] - PRECISION
    return int(level.view(INTEGER[values.dtype])), shift


def threshold_bin(counts: Tensor, k: int) -> int:
    """The first bin from which on there are k entries at most; none may be in it."""
    num_from = counts.flip(0).cumsum(0).flip(0)
    return int((num_from > k).sum())


def bin_threshold(bits: int, dtype: torch.dtype) -> float:
    return torch.tensor(bits, dtype=INTEGER[dtype]).view(dtype).item()


def accumulate_select(
    residual: Tensor,
    grad: Tensor,
    acc: Tensor,
    threshold: float,
    capacity: int,
    into: Room | None = None,
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
    assert result.indices is not None and offered.indices is not None
    # by a tensor: by a number, CUDA multiplies with the reciprocal, which rounds twice
    quotients = result.values * factor / result.values.new_full((), divisor)
    grad.zero_()
    grad[result.indices.long() - base] = quotients.to(grad.dtype)
    common = torch.isin(offered.indices, result.indices)
    residual[offered.indices[common].long() - base] -= offered.values[common] * factor


def encode_indices(indices: Tensor, lo: int, low_bits: int, low: Tensor, high: Tensor) -> None:
    offsets = indices.long() - lo
    places = torch.arange(low_bits, device=indices.device)
    low.copy_(_words((offsets.unsqueeze(1) >> places).bitwise_and_(1).view(-1), low.numel()))
    ones = torch.zeros(high.numel() * 32, dtype=torch.int64, device=indices.device)
    ones[(offsets >> low_bits) + torch.arange(len(indices), device=indices.device)] = 1
    high.copy_(_words(ones, high.numel()))


def add_at_(x: Tensor, sparse: Sparse, factor: float, base: int = 0) -> None:
    assert sparse.indices is not None
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
    count = out.numel()
    numbers = torch.arange(count, device=low.device)
    upper = _bits(high).nonzero().squeeze(1)[:count] - numbers
    places = torch.arange(low_bits, device=low.device)
    lower = (_bits(low)[: count * low_bits].view(count, low_bits) << places).sum(1)
    out.copy_((upper << low_bits) + lower + lo)


def _words(bits: Tensor, num_words: int) -> Tensor:
    """Bits as 32-bit words, the first lowest, zeros at the end."""
    padded = bits.new_zeros(num_words * 32)
    padded[: bits.numel()] = bits
    places = torch.arange(32, device=bits.device)
    return (padded.view(num_words, 32) << places).sum(1).to(torch.int32)


def _bits(words: Tensor) -> Tensor:
    places = torch.arange(32, device=words.device)
    return (words.long().unsqueeze(1) >> places).bitwise_and_(1).view(-1)
