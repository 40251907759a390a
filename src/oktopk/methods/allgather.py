# SPDX-License-Identifier: Apache-2.0
"""The all-gather of sparse selections, which `topka` and `gaussiank` share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.methods.base import (
    Average,
    SparseSum,
    check_told,
    codec_for,
    count_senders,
    divided,
    imbalance,
)
from oktopk.methods.cost_model import Cost, Work
from oktopk.methods.state import MethodState
from oktopk.sparse import Sparse
from oktopk.wire import message
from oktopk.wire.codec import CodecName, EntryRange, sizes_to_tell, told_ranges


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
    words, decoded, sent = message.write(local.indices, local.values, whole, codec, dense_part)
    sizes = comm.all_gather_sizes(sizes_to_tell(sent, codec), words.device, stage="counts")
    ranges = told_ranges(sizes, codec, [(0, local.numel)] * comm.size)
    check_told(ranges, codec, dtype, comm)
    counts = [entries.count for entries in ranges]
    incoming = {
        peer: message.num_words(ranges[peer], codec, dtype, dense_part.numel())
        for peer in comm.peers
    }
    received = comm.exchange(
        dict.fromkeys(comm.peers, words), incoming, words.device, stage="gather"
    )
    own = message.Message(local.indices, decoded, dense_part)
    indices, values, dense_sum = message.read_all(received, ranges, codec, own, comm.expect)
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
