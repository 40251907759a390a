# SPDX-License-Identifier: Apache-2.0
"""The methods that gather all selections on all ranks: `topka` and `gaussiank`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk import kernels, wire
from oktopk.comm.communicator import Comm
from oktopk.methods import selection
from oktopk.methods.base import (
    Average,
    Candidates,
    Cost,
    MethodState,
    SparseMethod,
    SparseSum,
    ThresholdEstimate,
    Work,
    check_told,
    codec_for,
    count_senders,
    divided,
    imbalance,
    slope_between,
)
from oktopk.methods.selection import TOLERANCE, exact_apart, smallest_threshold
from oktopk.sparse import Sparse, empty
from oktopk.wire import CodecName, EntryRange, sizes_to_tell, told_ranges

# The all-gather of sparse selections, which `topka` and `gaussiank` share.


@dataclass(frozen=True, slots=True)
class GatheredSelections:
    """What every rank has when all selections were sent to all ranks."""

    sums: Sparse
    """The sums of all entries that some rank selected, with the same bits on every rank."""

    num_senders: Tensor | None
    """How many ranks selected each of them; None if it is not asked for."""

    sent: Sparse
    """What this rank selected, as the receivers decoded it."""

    dense_sum: Tensor
    counts: list[int]
    """Entries that each rank selected."""

    num_sent: int
    """Entries that this rank sent, counted once per receiver."""


def gather_selections(
    local: Sparse, dense_part: Tensor, codec: CodecName, comm: Comm, average: Average
) -> GatheredSelections:
    """Send every rank's selection to every rank and sum it there: sizes, then one message each."""
    dtype = local.values.dtype
    whole = EntryRange(local.num, 0, local.numel)
    words, decoded, sent = wire.write_message(local.indices, local.values, whole, codec, dense_part)
    sizes = comm.all_gather_sizes(sizes_to_tell(sent, codec), words.device, stage="counts")
    ranges = told_ranges(sizes, codec, [(0, local.numel)] * comm.size)
    check_told(ranges, codec, dtype, comm)
    counts = [entries.count for entries in ranges]
    incoming = {
        peer: wire.message_words(ranges[peer], codec, dtype, dense_part.numel())
        for peer in comm.peers
    }
    received = comm.exchange(
        dict.fromkeys(comm.peers, words), incoming, words.device, stage="gather"
    )
    own = wire.Message(local.indices, decoded, dense_part)
    indices, values, dense_sum = wire.read_messages(received, ranges, codec, own, comm.expect)
    num_senders = None
    if average == "senders":
        num_senders = count_senders(indices, values, counts, 0, local.numel)
    return GatheredSelections(
        kernels.merge(indices, values, counts, 0, local.numel),
        num_senders,
        Sparse(local.indices, decoded, local.numel),
        dense_sum,
        counts,
        (local.num + dense_part.numel()) * (comm.size - 1),
    )


def all_gather(
    local: Sparse,
    dense_part: Tensor,
    k: int,
    state: MethodState,
    codec: CodecName,
    comm: Comm,
    average: Average = "all",
) -> SparseSum:
    """Send every rank's selection to every rank and sum it there. 2k(P-1) words: grows with P."""
    codec = codec_for(local.values, codec)
    gathered = gather_selections(local, dense_part, codec, comm, average)
    return SparseSum(
        divided(gathered.sums, gathered.num_senders),
        gathered.sent,
        gathered.dense_sum,
        imbalance=imbalance(gathered.counts),
        num_sent=gathered.num_sent,
    )


def cost(work: Work) -> Cost:
    """Every rank sends its k entries, and what travels dense, to all others; it adds all that it
    receives."""
    sent = (work.sparse_bytes(work.kept) + work.dense_bytes) * (work.size - 1)
    entries = work.kept * work.size
    return Cost(rounds=2, bytes=sent, sent=sent, elements=work.numel, entries=entries)


# `topka`: exact top k, by all-gather.


TOPKA = SparseMethod(
    name="topka",
    summary="exact top k, by allgather",
    words="2k(P-1)",
    cost=cost,
    select=selection.exact_apart,
    exchange=all_gather,
)


# `gaussiank`: about the top k, by a threshold from the normal distribution; by all-gather.


MAX_PASSES = 8


def select(acc: Tensor, k: int, state: MethodState, candidates: Candidates | None) -> Sparse:
    """Select by the threshold that k of n normal values reach, corrected until about k do.

    Gradients have heavier tails than the normal distribution, so the first threshold is off. Each
    correction costs one counting pass. Where no threshold gives about k entries (ties), the exact
    top k is selected.
    """
    if k <= 0:
        return empty(acc.numel(), acc)
    rms = float(torch.linalg.vector_norm(acc, dtype=torch.float64)) / acc.numel() ** 0.5
    quantile = torch.special.ndtri(torch.tensor(1 - k / acc.numel() / 2, dtype=torch.float64))
    estimate, last = ThresholdEstimate(rms * quantile.item()), (0.0, 0)
    for _ in range(MAX_PASSES):
        threshold = max(estimate.threshold, smallest_threshold(acc))
        local, count = kernels.select(acc, threshold, k)
        has_all = threshold == smallest_threshold(acc) and count < k
        if (1 - TOLERANCE) * k <= count <= k or has_all:
            return local
        (low, num_low), (high, num_high) = sorted([last, (threshold, count)])
        slope = slope_between(low, num_low, high, num_high) or estimate.slope
        # aim for the middle of the tolerance below k: entries beyond k would have to be cut off
        ratio = max(count, 1) / k / (1 - TOLERANCE / 2)
        estimate = ThresholdEstimate(threshold, slope).updated(threshold, ratio)
        last = (threshold, count)
    return exact_apart(acc, k, state, candidates)


GAUSSIANK = SparseMethod(
    name="gaussiank",
    summary="about top k by a normal quantile, by allgather",
    words="2k'(P-1), k' within 10 % of k",
    cost=cost,
    select=select,
    exchange=all_gather,
)
