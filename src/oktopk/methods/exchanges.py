"""Move three, one function per method: every rank's `local` in, the same `result` out on each.

What a rank offered and finds in the result is off its residual; that rule is the same for all
methods (`feedback.py`). `returned` is what a rank must keep beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.methods.ok_topk import balance
from oktopk.methods.ok_topk.global_threshold import select_globally
from oktopk.methods.ok_topk.regions import (
    agreed_bounds,
    equal_bounds,
    one_owner_bounds,
    split_reduce,
)
from oktopk.methods.selection import top
from oktopk.methods.state import State
from oktopk.sparse import Sparse, empty
from oktopk.wire import codec, message
from oktopk.wire.codec import Form, Run


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The global sum, and what came to this rank to keep."""

    result: Sparse
    """The same bits on every rank."""

    offered: Sparse
    """What this rank offered, as it arrived: rounded where the wire form rounds."""

    rider: Tensor
    """The sum of what travelled whole, the same bits on every rank."""

    returned: tuple[Sparse, ...] = ()
    """What was taken off sums on this rank though their index is in the result."""

    imbalance: float = 1.0
    """Largest share of the result over the mean share."""

    sent: int = 0
    """Entries this rank sent, riders among them, each as often as it was."""

    base: int = 0
    """What indices count from: where a bucket begins among those it was exchanged with."""


def dense(local: Sparse, rider: Tensor, k: int, state: State, comm: Comm) -> Exchanged:
    """Sum everything. One allreduce: 2n(P-1)/P words."""
    total = comm.all_reduce_(local.values, stage="dense")
    return Exchanged(Sparse(None, total, local.numel), local, rider)


def allgather(local: Sparse, rider: Tensor, k: int, state: State, comm: Comm) -> Exchanged:
    """Gather every rank's selection and sum it here. 2k(P-1) words: grows with P."""
    form, dtype = _form(local, state), local.values.dtype
    assert local.indices is not None
    counts = comm.all_gather_size(local.num, local.values.device, stage="counts")
    runs = [Run(count, 0, local.numel) for count in counts]
    mine, arriving = message.write(local.indices, local.values, runs[comm.rank], form, rider)
    sizes = {peer: message.size(runs[peer], form, dtype, rider.numel()) for peer in comm.peers}
    heard = comm.exchange(dict.fromkeys(comm.peers, mine), sizes, mine.device, stage="gather")
    own = comm.rank, local.indices, arriving, rider
    indices, values, total = message.read_all(heard, runs, form, own)
    return Exchanged(
        kernels.merge(indices, values, counts, 0, local.numel),
        Sparse(local.indices, arriving, local.numel),
        total,
        imbalance=_imbalance(counts),
        sent=(local.num + rider.numel()) * (comm.size - 1),
    )


def region_gather(local: Sparse, rider: Tensor, k: int, state: State, comm: Comm) -> Exchanged:
    """Sparse reduce-scatter over equal regions, then gather all sums; dense when that is less.

    4k(P-1)/P words when all ranks chose alike, up to (2k+n)(P-1)/P when nothing overlaps.
    """
    form, dtype = _form(local, state), local.values.dtype
    bounds = equal_bounds(local.numel, comm.size)
    mine = split_reduce(local, rider, bounds, comm, form)
    counts = comm.all_gather_size(mine.region.num, local.values.device, stage="counts")
    words = [
        codec.num_words(Run(count, lo, hi), form, dtype)
        for count, (lo, hi) in zip(counts, pairwise(bounds), strict=True)
    ]
    if sum(words) < local.numel * codec.words_per_value(dtype):
        all_sums = balance.gather(mine.region, counts, bounds, mine.share, comm, form)
        result, rider_sum, sent = all_sums.result, all_sums.rider, all_sums.sent
        returned = () if all_sums.lost is None else (all_sums.lost,)
    else:
        result, rider_sum = _gather_densely(mine.region, bounds, mine.share, comm)
        sent, returned = (mine.region.num + mine.share.numel()) * (comm.size - 1), ()
    return Exchanged(
        result,
        mine.offered,
        rider_sum[: rider.numel()],
        returned=returned,
        imbalance=_imbalance(counts),
        sent=mine.outside + mine.share.numel() * (comm.size - 1) + sent,
    )


def _gather_densely(
    region: Sparse, bounds: list[int], share: Tensor, comm: Comm
) -> tuple[Sparse, Tensor]:
    """Every rank's region as it is, zeros and all, and the shares of the riders."""
    # a sum of 0 is told from nothing by its sign: its parts were offered and must leave residuals
    sums = region.values
    marked = Sparse(region.indices, torch.where(sums == 0, -0.0, sums), region.numel)
    mine = torch.cat([marked.to_dense()[bounds[comm.rank] : bounds[comm.rank + 1]], share])
    words = codec.words_per_value(mine.dtype)
    widths = [hi - lo for lo, hi in pairwise(bounds)]
    sizes = {rank: (widths[rank] + share.numel()) * words for rank in comm.peers}
    bits = mine.view(torch.int32)
    heard = comm.exchange(dict.fromkeys(comm.peers, bits), sizes, bits.device, stage="gather")
    heard[comm.rank] = bits
    blocks = [heard[rank].clone().view(mine.dtype) for rank in range(comm.size)]
    everything = torch.cat([block[:width] for block, width in zip(blocks, widths, strict=True)])
    riders = torch.cat([block[width:] for block, width in zip(blocks, widths, strict=True)])
    indices = (everything.ne(0) | everything.signbit()).nonzero().squeeze(1)
    return Sparse(indices.int(), everything[indices], region.numel), riders


def tree_merge(local: Sparse, rider: Tensor, k: int, state: State, comm: Comm) -> Exchanged:
    """Merge pairwise up a tree, keeping k at every node; then pass the last k down.

    A rank sends 2k words up and 2k to each child on the way down; 4k log P pass on the longest way.
    A node may cut a sum whose index survives through another branch, or round it: the published
    method loses that, here it stays with the node that did it.
    """
    form = _form(local, state)
    mine, total, cut, sent = local, rider.clone(), [], 0
    strides = [1 << level for level in range((comm.size - 1).bit_length())]
    for stride in strides:
        child, parent = _tree_edges(comm, stride)
        letter, lost = _letter(mine, total, form) if parent is not None else (None, [])
        cut += lost
        sent += mine.num + rider.numel() if parent is not None else 0
        heard = _pass(letter, mine.num, parent, child, (local, rider), comm, form, stage="reduce")
        if heard is not None:
            both = _merge_two(mine, heard[1])
            mine = top(both, k)[0]
            cut.append(_filtered(both, mine, invert=True))
            total += heard[2]
    letter = None
    if comm.rank == 0:  # all read the words of the root, itself too
        letter, lost = _letter(mine, total, form)
        mine, _ = _opened(letter, mine.num, local, form)
        cut += lost
    for stride in reversed(strides):
        child, parent = _tree_edges(comm, stride)
        args = letter, mine.num, child, parent, (local, rider), comm, form
        heard = _pass(*args, stage="broadcast")
        sent += mine.num + rider.numel() if child is not None else 0
        if heard is not None:
            letter, mine, total = heard
    returned = tuple(_filtered(sums, mine, invert=False) for sums in cut)
    return Exchanged(mine, local, total, returned=returned, sent=sent)


def oktopk(local: Sparse, rider: Tensor, k: int, state: State, comm: Comm) -> Exchanged:
    """Ok-Topk: at most 6k(P-1)/P words, whatever P (`balance.entry_bound`)."""
    form = _form(local, state)
    due = state.bounds is None or state.step % state.bounds_every == 0 or state.uneven
    if due and not state.one_owner:
        state.bounds = agreed_bounds(local, comm)
    assert state.bounds is not None
    bounds = state.bounds
    mine = split_reduce(local, rider, bounds, comm, form)
    kept = select_globally(mine.region, mine.outside, k, state, comm)
    sums = balance.gather(
        kept.region, kept.counts, bounds, mine.share, comm, form, balanced=kept.balanced
    )
    state.step += 1
    state.uneven = kept.balanced
    if kept.cut:
        state.one_owner, state.bounds = True, one_owner_bounds(local.numel, comm.size)
    return Exchanged(
        sums.result,
        mine.offered,
        sums.rider[: rider.numel()],
        returned=() if sums.lost is None else (sums.lost,),
        imbalance=_imbalance(kept.counts),
        sent=mine.outside + mine.share.numel() * (comm.size - 1) + sums.sent,
    )


def _form(local: Sparse, state: State) -> Form:
    """64-bit gradients are for people who want every bit."""
    return "plain" if local.values.dtype == torch.float64 else state.wire


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


def _letter(mine: Sparse, rider: Tensor, form: Form) -> tuple[Tensor, list[Sparse]]:
    """My set and riders as words, and what rounding takes off it, if anything."""
    assert mine.indices is not None
    run = Run(mine.num, 0, mine.numel)
    words, arriving = message.write(mine.indices, mine.values, run, form, rider)
    if form == "plain":
        return words, []
    return words, [Sparse(mine.indices, mine.values - arriving, mine.numel)]


def _pass(
    letter: Tensor | None,
    num: int,
    to: int | None,
    source: int | None,
    like: tuple[Sparse, Tensor],
    comm: Comm,
    form: Form,
    *,
    stage: str,
) -> tuple[Tensor, Sparse, Tensor] | None:
    """Hand a letter of `num` entries to one rank of the tree; what another handed me, if one did.

    `like` has the size of the vector and of the riders.
    """
    local, rider = like
    dtype = local.values.dtype
    run = Run(comm.shift(num, to, source, local.values.device, stage=stage), 0, local.numel)
    sizes = {} if source is None else {source: message.size(run, form, dtype, rider.numel())}
    outgoing = {to: letter} if to is not None and letter is not None else {}
    heard = comm.exchange(outgoing, sizes, local.values.device, stage=stage)
    if source is None:
        return None
    return heard[source], *_opened(heard[source], run.count, local, form)


def _opened(letter: Tensor, num: int, like: Sparse, form: Form) -> tuple[Sparse, Tensor]:
    """The entries and riders of a letter."""
    run = Run(num, 0, like.numel)
    indices, _, values, _ = codec.room([run], like.values)
    rider = message.read(letter, run, form, indices, values)
    return Sparse(indices, values, like.numel), rider


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
