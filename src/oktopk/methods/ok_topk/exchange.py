# SPDX-License-Identifier: Apache-2.0
"""`oktopk`: top k by region: split and reduce, global threshold, balanced gather.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.
"""

from __future__ import annotations

from torch import Tensor

from oktopk.comm.communicator import Comm
from oktopk.methods import allgather
from oktopk.methods.base import (
    Average,
    SparseMethod,
    SparseSum,
    at_indices,
    codec_for,
    correction,
    divided,
    imbalance,
)
from oktopk.methods.cost_model import Cost, Work
from oktopk.methods.ok_topk import short_path
from oktopk.methods.ok_topk.balance import gather
from oktopk.methods.ok_topk.global_threshold import select_globally
from oktopk.methods.ok_topk.regions import balanced_bounds, single_owner_bounds, split_reduce
from oktopk.methods.ok_topk.selection import near_exact, propose_candidates
from oktopk.methods.state import MethodState
from oktopk.sparse import Sparse
from oktopk.wire.codec import CodecName


def exchange(
    local: Sparse,
    dense_part: Tensor,
    k: int,
    state: MethodState,
    codec: CodecName,
    comm: Comm,
    average: Average = "all",
) -> SparseSum:
    """Sum the selections of all ranks and keep about k sums. At most 6k(P-1)/P words, whatever P.

    `balance.max_entries` has the exact bound. The largest sums are kept, also where each is then
    divided by the number of its senders: entries that many ranks agree on go first. A small
    exchange takes the short path.
    """
    codec = codec_for(local.values, codec)
    dtype, num_dense = local.values.dtype, dense_part.numel()
    if short_path.is_short(
        Work(local.numel, k, comm.size, codec, dtype, num_dense, state.short_bytes)
    ):
        state.step += 1
        return short_path.exchange(local, dense_part, k, codec, comm, average)
    due = state.bounds is None or state.step % state.bounds_every == 0 or state.uneven
    if state.bounds is None or (due and not state.single_owner):
        state.bounds = balanced_bounds(local, comm)
    bounds = state.bounds
    reduced = split_reduce(local, dense_part, bounds, comm, codec, average)
    kept = select_globally(reduced.region, reduced.num_sent, k, state, comm)
    num_senders = reduced.num_senders
    if num_senders is not None:
        num_senders = at_indices(num_senders, reduced.region, kept.region)
    sums = gather(
        divided(kept.region, num_senders),
        kept.counts,
        bounds,
        reduced.dense_share,
        comm,
        codec,
        balanced=kept.balanced,
    )
    state.step += 1
    state.uneven = kept.balanced
    if kept.was_cut:
        state.single_owner = True
        state.bounds = single_owner_bounds(local.numel, comm.size)
    return SparseSum(
        sums.result,
        reduced.sent,
        sums.dense_part[: dense_part.numel()],
        corrections=correction(kept.region, sums.decoded, num_senders, codec),
        imbalance=imbalance(kept.counts),
        num_sent=reduced.num_sent + reduced.dense_share.numel() * (comm.size - 1) + sums.num_sent,
    )


def cost(work: Work) -> Cost:
    """k entries to the owners of their regions, then k sums to everyone; or the short path."""
    if short_path.is_short(work):
        return allgather.cost(work)
    sent = 2 * (work.size - 1) / work.size * (work.sparse_bytes(work.kept) + work.dense_bytes)
    return Cost(
        rounds=4 + work.size_rounds,
        bytes=sent,
        sent=sent,
        elements=work.numel,
        entries=4 * work.kept,
    )


METHOD = SparseMethod(
    name="oktopk",
    summary="top k by region: split and reduce, global threshold, balanced gather",
    words="4k(P-1)/P, at most 6k(P-1)/P",
    cost=cost,
    keeps_k=True,
    select=near_exact,
    propose=propose_candidates,
    exchange=exchange,
)
