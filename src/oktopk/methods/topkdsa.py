# SPDX-License-Identifier: Apache-2.0
"""`topkdsa`: exact top k, by a sparse reduce-scatter and an all-gather (as in SparCML)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from oktopk.comm.communicator import Comm
from oktopk.methods import selection
from oktopk.methods.balance import gather
from oktopk.methods.base import (
    Average,
    Cost,
    MethodState,
    SparseMethod,
    SparseSum,
    Work,
    codec_for,
    correction,
    divided,
    imbalance,
)
from oktopk.methods.ok_topk import equal_bounds, split_reduce
from oktopk.sparse import Sparse
from oktopk.wire import CodecName, EntryRange, max_words, words_per_value


def exchange(
    local: Sparse,
    dense_part: Tensor,
    k: int,
    state: MethodState,
    codec: CodecName,
    comm: Comm,
    average: Average = "all",
) -> SparseSum:
    """Sum equal regions, then gather all sums; as dense vectors where that takes fewer words.

    4k(P-1)/P words when all ranks selected alike, up to (2k+n)(P-1)/P when nothing overlaps.
    """
    codec, dtype = codec_for(local.values, codec), local.values.dtype
    bounds = equal_bounds(local.numel, comm.size)
    reduced = split_reduce(local, dense_part, bounds, comm, codec, average)
    region, num_senders = divided(reduced.region, reduced.num_senders), reduced.num_senders
    counts = comm.all_gather_size(region.num, local.values.device, stage="counts")
    sparse_words = sum(
        max_words(EntryRange(count, lo, hi), codec, dtype)
        for count, (lo, hi) in zip(counts, pairwise(bounds), strict=True)
    )
    if sparse_words < local.numel * words_per_value(dtype):
        sums = gather(region, counts, bounds, reduced.dense_share, comm, codec)
        result, dense_sum, num_sent = sums.result, sums.dense_part, sums.num_sent
        decoded, gathered_as = sums.decoded, codec
    else:
        result, dense_sum = _gather_dense(region, bounds, reduced.dense_share, comm)
        num_sent = (region.num + reduced.dense_share.numel()) * (comm.size - 1)
        decoded, gathered_as = region.values, "plain"
    return SparseSum(
        result,
        reduced.sent,
        dense_sum[: dense_part.numel()],
        corrections=correction(reduced.region, decoded, num_senders, gathered_as),
        imbalance=imbalance(counts),
        num_sent=reduced.num_sent + reduced.dense_share.numel() * (comm.size - 1) + num_sent,
    )


def _gather_dense(
    region: Sparse, bounds: list[int], dense_share: Tensor, comm: Comm
) -> tuple[Sparse, Tensor]:
    """Gather every rank's region as a dense vector, and the shares of what travels dense."""
    # A sum of 0 belongs to the result: its parts must leave the residuals. It travels as -0.0,
    # which tells it from the zeros of entries that no rank selected.
    sums = torch.where(region.values == 0, -0.0, region.values)
    dense_region = Sparse(region.indices, sums, region.numel).to_dense()
    own = dense_region[bounds[comm.rank] : bounds[comm.rank + 1]]
    words = torch.cat([own, dense_share]).view(torch.int32)
    widths = [hi - lo for lo, hi in pairwise(bounds)]
    per_value = words_per_value(sums.dtype)
    sizes = {rank: (widths[rank] + dense_share.numel()) * per_value for rank in comm.peers}
    received = comm.exchange(dict.fromkeys(comm.peers, words), sizes, words.device, stage="gather")
    received[comm.rank] = words
    blocks = [received[rank].clone().view(sums.dtype) for rank in range(comm.size)]
    values = torch.cat([block[:width] for block, width in zip(blocks, widths, strict=True)])
    dense_sum = torch.cat([block[width:] for block, width in zip(blocks, widths, strict=True)])
    indices = (values.ne(0) | values.signbit()).nonzero().squeeze(1)
    return Sparse(indices.int(), values[indices], region.numel), dense_sum


def cost(work: Work) -> Cost:
    """k entries to the owners of their regions, then the union of all selections to everyone."""
    share = (work.size - 1) / work.size
    gathered = min(work.sparse_bytes(work.union), work.numel * work.dtype.itemsize)
    sent = share * (work.sparse_bytes(work.kept) + gathered + 2 * work.dense_bytes)
    return Cost(
        rounds=4 + work.size_rounds,
        bytes=sent,
        sent=sent,
        elements=work.numel,
        entries=2 * work.kept + work.union,
    )


METHOD = SparseMethod(
    name="topkdsa",
    summary="exact top k, by sparse reduce-scatter and allgather, dense on fill-in",
    words="4k(P-1)/P .. (2k+n)(P-1)/P",
    cost=cost,
    select=selection.exact_apart,
    exchange=exchange,
)
