"""Move three, one function per method: every rank's `local` in, the same `result` out on each.

What a rank offered and finds in the result is off its residual; that rule is the same for all
methods (`feedback.py`). `returned` is what a rank must keep beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from oktopk import kernels, wire
from oktopk.comm import Comm
from oktopk.methods import balance, riders
from oktopk.methods.agreement import select_globally
from oktopk.methods.regions import (
    agreed_bounds,
    equal_bounds,
    gather_with_share,
    one_owner_bounds,
    split_reduce,
    unpacked,
)
from oktopk.methods.riders import in_rank_order
from oktopk.methods.selection import top
from oktopk.methods.state import State
from oktopk.sparse import Sparse, empty


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The global sum, and what came to this rank to keep."""

    result: Sparse
    """The same bits on every rank."""

    rider: Tensor
    """The sum of what travelled whole, the same bits on every rank."""

    returned: tuple[Sparse, ...] = ()
    """Sums that were cut off on this rank though their index is in the result."""

    imbalance: float = 1.0
    """Largest share of the result over the mean share."""

    sent: int = 0
    """Entries this rank sent, each as often as it was."""


def dense(local: Sparse, rider: Tensor, k: int, state: State, comm: Comm) -> Exchanged:
    """Sum everything. One allreduce: 2n(P-1)/P words."""
    total = comm.all_reduce_(local.values, stage="dense")
    return Exchanged(Sparse(None, total, local.numel), rider)


def allgather(local: Sparse, rider: Tensor, k: int, state: State, comm: Comm) -> Exchanged:
    """Gather every rank's selection and sum it here. 2k(P-1) words: grows with P."""
    counts = comm.all_gather_size(local.num, local.values.device, stage="counts")
    rows, parts = gather_with_share(wire.pack(local), counts, rider, comm)
    indices, values = wire.unpack(rows, local.values.dtype)
    result = kernels.merge(indices, values, counts, 0, local.numel)
    total = in_rank_order(parts.view(comm.size, rider.numel()))
    return Exchanged(result, total, imbalance=_imbalance(counts))


def region_gather(local: Sparse, rider: Tensor, k: int, state: State, comm: Comm) -> Exchanged:
    """Sparse reduce-scatter over equal regions, then gather all sums; dense when that is less.

    4k(P-1)/P words when all ranks chose alike, up to (2k+n)(P-1)/P when nothing overlaps.
    """
    bounds = equal_bounds(local.numel, comm.size)
    mine = split_reduce(local, rider, bounds, comm)
    counts = comm.all_gather_size(mine.region.num, local.values.device, stage="counts")
    value_words = wire.words_per_value(local.values.dtype)
    if sum(counts) * (1 + value_words) < local.numel * value_words:
        rows, total = gather_with_share(wire.pack(mine.region), counts, mine.share, comm)
        result = unpacked(rows, local)
        return Exchanged(result, total[: rider.numel()], imbalance=_imbalance(counts))
    widths = [hi - lo + mine.share.numel() for lo, hi in pairwise(bounds)]
    # a sum of 0 is told from nothing by its sign: its parts were offered and must leave residuals
    sums = mine.region.values
    marked = Sparse(mine.region.indices, torch.where(sums == 0, -0.0, sums), local.numel)
    region = marked.to_dense()[bounds[comm.rank] : bounds[comm.rank + 1]]
    blocks = comm.gather_rows(torch.cat([region, mine.share]), widths, stage="gather").split(widths)
    ends = [width - mine.share.numel() for width in widths]
    everything = torch.cat([block[:end] for block, end in zip(blocks, ends, strict=True)])
    total = torch.cat([block[end:] for block, end in zip(blocks, ends, strict=True)])
    indices = (everything.ne(0) | everything.signbit()).nonzero().squeeze(1)
    result = Sparse(indices.int(), everything[indices], local.numel)
    return Exchanged(result, total[: rider.numel()])


def tree_merge(local: Sparse, rider: Tensor, k: int, state: State, comm: Comm) -> Exchanged:
    """Merge pairwise up a tree, keeping k at every node; then pass the last k down.

    A rank sends 2k words up and 2k to each child on the way down; 4k log P pass on the longest way.
    A node may cut a sum whose index survives through another branch: the published method loses
    it, here it stays with the node that cut it.
    """
    mine, total, cut = local, rider.clone(), []
    strides = [1 << level for level in range((comm.size - 1).bit_length())]
    for stride in strides:
        child, parent = _tree_edges(comm, stride)
        heard = _pass(mine, total, parent, child, comm, stage="reduce")
        if heard is not None:
            both = _merge_two(mine, heard[0])
            mine = top(both, k)[0]
            cut.append(_filtered(both, mine, invert=True))
            total += heard[1]
    for stride in reversed(strides):
        child, parent = _tree_edges(comm, stride)
        heard = _pass(mine, total, child, parent, comm, stage="broadcast")
        if heard is not None:
            mine, total = heard
    returned = tuple(_filtered(sums, mine, invert=False) for sums in cut)
    return Exchanged(mine, total, returned=returned)


def oktopk(local: Sparse, rider: Tensor, k: int, state: State, comm: Comm) -> Exchanged:
    """Ok-Topk: at most 6k(P-1)/P words, whatever P (`balance.entry_bound`)."""
    due = state.bounds is None or state.step % state.bounds_every == 0 or state.uneven
    if due and not state.one_owner:
        state.bounds = torch.tensor(agreed_bounds(local, comm), dtype=torch.int64)
    assert state.bounds is not None
    mine = split_reduce(local, rider, state.bounds.tolist(), comm)
    kept = select_globally(mine.region, mine.outside, k, state, comm)
    rows, total = balance.gather(
        wire.pack(kept.region), kept.counts, mine.share, comm, balanced=kept.balanced
    )
    state.step += 1
    state.uneven = kept.balanced
    if kept.cut:
        state.one_owner, state.bounds = True, torch.tensor(one_owner_bounds(local.numel, comm.size))
    imbalance = _imbalance(kept.counts)
    return Exchanged(unpacked(rows, local), total[: rider.numel()], imbalance=imbalance)


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


def _pass(
    mine: Sparse, rider: Tensor, to: int | None, source: int | None, comm: Comm, *, stage: str
) -> tuple[Sparse, Tensor] | None:
    """Hand my set and riders to one rank of the tree; what another handed me, None from nobody."""
    aboard = riders.to_rows(rider.unsqueeze(0))
    rows, _ = riders.board(wire.pack(mine), [mine.num], aboard)
    rows = comm.shift(rows, to=to, source=source, stage=stage)
    if source is None:
        return None
    rows, _, aboard = riders.alight(rows, [len(rows)], aboard.shape[1])
    values = riders.to_values(aboard, rider.numel(), rider.dtype)[0]
    return unpacked(rows, mine), values


def _merge_two(a: Sparse, b: Sparse) -> Sparse:
    assert a.indices is not None and b.indices is not None
    indices, values = torch.cat([a.indices, b.indices]), torch.cat([a.values, b.values])
    return kernels.merge(indices, values, [a.num, b.num], 0, a.numel)


def _filtered(sparse: Sparse, other: Sparse, *, invert: bool) -> Sparse:
    assert sparse.indices is not None and other.indices is not None
    if not other.num:
        return sparse if invert else empty(sparse.numel, sparse.values)
    place = torch.searchsorted(other.indices, sparse.indices).clamp_(max=other.num - 1)
    keep = (other.indices[place] == sparse.indices) ^ invert
    return Sparse(sparse.indices[keep], sparse.values[keep], sparse.numel)
