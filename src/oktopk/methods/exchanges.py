"""Move three, one function per method: every rank's `local` in, the same `result` out on each.

What a rank offered and finds in the result is off its residual; that rule is the same for all
methods (`feedback.py`). `returned` is what a rank must keep beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from oktopk import kernels, wire
from oktopk.comm import Comm
from oktopk.methods import balance
from oktopk.methods.agreement import select_globally
from oktopk.methods.regions import agreed_bounds, equal_bounds, split_reduce, unpacked
from oktopk.methods.selection import top
from oktopk.methods.state import State
from oktopk.sparse import Sparse


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The global sum, and what came to this rank to keep."""

    result: Sparse
    """The same bits on every rank."""

    returned: tuple[Sparse, ...] = ()
    """Sums that were cut off on this rank though their index is in the result."""

    imbalance: float = 1.0
    """Largest share of the result over the mean share."""


def dense(local: Sparse, k: int, state: State, comm: Comm) -> Exchanged:
    """Sum everything. One allreduce: 2n(P-1)/P words."""
    return Exchanged(Sparse(None, comm.all_reduce_(local.values, stage="dense"), local.numel))


def allgather(local: Sparse, k: int, state: State, comm: Comm) -> Exchanged:
    """Gather every rank's selection and sum it here. 2k(P-1) words: grows with P."""
    counts = _counts(local.num, local, comm)
    rows = comm.gather_rows(wire.pack(local), counts, stage="gather")
    indices, values = wire.unpack(rows, local.values.dtype)
    result = kernels.merge(indices, values, counts, 0, local.numel)
    return Exchanged(result, imbalance=_imbalance(counts))


def region_gather(local: Sparse, k: int, state: State, comm: Comm) -> Exchanged:
    """Sparse reduce-scatter over equal regions, then gather all sums; dense when that is less.

    4k(P-1)/P words when all ranks chose alike, up to (2k+n)(P-1)/P when nothing overlaps.
    """
    bounds = equal_bounds(local.numel, comm.size)
    region, _ = split_reduce(local, bounds, comm)
    counts = _counts(region.num, local, comm)
    value_words = wire.words_per_value(local.values.dtype)
    if sum(counts) * (1 + value_words) < local.numel * value_words:
        rows = comm.gather_rows(wire.pack(region), counts, stage="gather")
        return Exchanged(unpacked(rows, local), imbalance=_imbalance(counts))
    widths = [hi - lo for lo, hi in pairwise(bounds)]
    values = region.to_dense()[bounds[comm.rank] : bounds[comm.rank + 1]]
    everything = comm.gather_rows(values, widths, stage="gather")
    indices = everything.nonzero().squeeze(1)
    return Exchanged(Sparse(indices.int(), everything[indices], local.numel))


def tree_merge(local: Sparse, k: int, state: State, comm: Comm) -> Exchanged:
    """Merge pairwise up a tree, keeping k at every node; then pass the last k down.

    A rank sends 2k words up and 2k to each child on the way down; 4k log P pass on the longest way.
    A node may cut a sum whose index survives through another branch: the published method loses
    it, here it stays with the node that cut it.
    """
    mine, cut = local, []
    strides = [1 << level for level in range((comm.size - 1).bit_length())]
    for stride in strides:
        child, parent = _tree_edges(comm, stride)
        rows = comm.shift(wire.pack(mine), to=parent, source=child, stage="reduce")
        if child is not None:
            both = _merge_two(mine, unpacked(rows, local))
            mine = top(both, k)[0]
            cut.append(_missing(both, mine))
    for stride in reversed(strides):
        child, parent = _tree_edges(comm, stride)
        rows = comm.shift(wire.pack(mine), to=child, source=parent, stage="broadcast")
        if parent is not None:
            mine = unpacked(rows, local)
    return Exchanged(mine, returned=tuple(_common(sums, mine) for sums in cut))


def oktopk(local: Sparse, k: int, state: State, comm: Comm) -> Exchanged:
    """Ok-Topk: at most 6k(P-1)/P words, whatever P (k taken up to a multiple of P)."""
    if state.bounds is None or state.step % state.bounds_every == 0 or state.uneven:
        state.bounds = torch.tensor(agreed_bounds(local, comm), dtype=torch.int64)
    region, outside = split_reduce(local, state.bounds.tolist(), comm)
    kept = select_globally(region, outside, k, state, comm)
    balanced = balance.must_balance(kept.counts, kept.outside, k)
    rows = balance.gather(wire.pack(kept.region), kept.counts, comm, balanced=balanced)
    state.step += 1
    state.uneven = balanced
    return Exchanged(unpacked(rows, local), imbalance=_imbalance(kept.counts))


def _counts(num: int, like: Sparse, comm: Comm) -> list[int]:
    mine = torch.tensor([num], dtype=torch.int32, device=like.values.device)
    return comm.all_gather(mine, stage="counts").view(-1).tolist()


def _imbalance(counts: list[int]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0


def _tree_edges(comm: Comm, stride: int) -> tuple[int | None, int | None]:
    """This rank's child and parent in the round of a stride; None where there is none."""
    if comm.rank % stride:
        return None, None
    if comm.rank & stride:
        return None, comm.rank - stride
    child = comm.rank + stride
    return (child if child < comm.size else None), None


def _merge_two(a: Sparse, b: Sparse) -> Sparse:
    assert a.indices is not None and b.indices is not None
    indices, values = torch.cat([a.indices, b.indices]), torch.cat([a.values, b.values])
    return kernels.merge(indices, values, [a.num, b.num], 0, a.numel)


def _missing(full: Sparse, part: Sparse) -> Sparse:
    return _filtered(full, part, invert=True)


def _common(sums: Sparse, result: Sparse) -> Sparse:
    return _filtered(sums, result, invert=False)


def _filtered(sparse: Sparse, other: Sparse, *, invert: bool) -> Sparse:
    assert sparse.indices is not None and other.indices is not None
    keep = torch.isin(sparse.indices, other.indices, invert=invert)
    return Sparse(sparse.indices[keep], sparse.values[keep], sparse.numel)
