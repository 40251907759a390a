# SPDX-License-Identifier: Apache-2.0
"""The short path of `oktopk`: two rounds for an exchange so small that rounds are what it costs.

Every rank sends its selection to every rank, sums all of them in rank order and keeps the k largest
sums. There is no owner of a region, so there are no bounds, no counts to agree on a threshold, and
no second rounding. It sends P/2 times the bytes of the long path and half of its rounds.
"""

from __future__ import annotations

from torch import Tensor

from oktopk.comm.communicator import Comm
from oktopk.methods.allgather import gather_selections
from oktopk.methods.base import Average, SparseSum, divided, imbalance
from oktopk.methods.cost_model import Work
from oktopk.methods.ok_topk.balance import max_entries
from oktopk.methods.selection import largest_positions
from oktopk.sparse import Sparse
from oktopk.wire.codec import CodecName, EntryRange, most_words
from oktopk.wire.words import WORD_BYTES


def is_short(work: Work) -> bool:
    """Whether an exchange takes the short path: the same answer on every rank.

    It depends on the most that a rank may select, never on what it did select. Its messages must be
    small, and its entries within the bound on words.
    """
    peers = work.size - 1
    most = most_words(EntryRange(work.kept, 0, work.numel), work.codec, work.dtype)
    entries = WORD_BYTES * most * peers
    bound = max_entries(work.kept, work.size) * (WORD_BYTES + work.dtype.itemsize)
    return entries <= bound and entries + work.dense_bytes * peers < work.short_bytes


def exchange(
    local: Sparse,
    dense_part: Tensor,
    k: int,
    codec: CodecName,
    comm: Comm,
    average: Average = "all",
) -> SparseSum:
    """Sum the selections of all ranks and keep the k largest sums, or all if there are fewer.

    All ranks sum the same numbers in the same order, so all of them keep the same bits. Ties go to
    the lower index.
    """
    gathered = gather_selections(local, dense_part, codec, comm, average)
    kept, num_senders = gathered.sums, gathered.num_senders
    if kept.num > k:
        where = largest_positions(kept.values, k)
        kept = Sparse(kept.indices[where], kept.values[where], kept.numel)
        num_senders = None if num_senders is None else num_senders[where]
    return SparseSum(
        divided(kept, num_senders),
        gathered.sent,
        gathered.dense_sum,
        imbalance=imbalance(gathered.counts),
        num_sent=gathered.num_sent,
    )
