# SPDX-License-Identifier: Apache-2.0
"""How a model that is sharded over ranks keeps k entries of the whole, and agrees to apply a step.

With FSDP2, a rank has one shard of the gradient and exchanges it with the ranks that have the same
shard of other replicas. Each shard is a vector of its own with its own exchange. Two things concern
all shards: the k largest entries of the whole model are not equally many in every shard, and a NaN
in one shard must keep all ranks from applying the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.engine.buckets import Buckets, share_out
from oktopk.methods.ok_topk.global_threshold import kth_over_ranks
from oktopk.methods.selection import smallest_threshold, top_k
from oktopk.utils.device import to_device, to_host


class Shards(Protocol):
    """Which shard of the model this rank exchanges, of how many."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def comm(self) -> Comm | None:
        """Of the ranks that have the other shards; None if there are none."""
        ...

    def num_sparse(self, buckets: Buckets) -> int:
        """Entries of the whole model that travel sparse."""
        ...

    def agree_on_finite(self, finite: bool, device: torch.device) -> bool:
        """Whether no shard of any replica had a NaN or Inf, where `finite` is of this shard."""
        ...

    def divide(self, acc: Tensor, k: int, replicas: Comm) -> list[int]:
        """How many of the k entries each shard keeps, the same on every rank of every replica."""
        ...


class Unsharded:
    """The whole model is on every rank: there is one shard, and it keeps all of k."""

    rank, size, comm = 0, 1, None

    def num_sparse(self, buckets: Buckets) -> int:
        return buckets.numel - buckets.num_dense

    def agree_on_finite(self, finite: bool, device: torch.device) -> bool:
        return finite

    def divide(self, acc: Tensor, k: int, replicas: Comm) -> list[int]:
        return [k]


UNSHARDED = Unsharded()


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """The ranks that have the other shards of this replica."""

    comm: Comm
    limits: list[int]
    """By shard: entries that travel sparse, without the padding."""

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def num_sparse(self, buckets: Buckets) -> int:
        return sum(self.limits)

    def agree_on_finite(self, finite: bool, device: torch.device) -> bool:
        """Header: 4(S-1) bytes inside the shard group. The replicas of a shard agree already."""
        mine = to_device([int(not finite)], torch.int32, device)
        return not any(to_host(self.comm.all_gather_header(mine, stage="finite").view(-1))[0])

    def divide(self, acc: Tensor, k: int, replicas: Comm) -> list[int]:
        """Count how many of the k largest entries of its model each replica has in every shard, and
        divide k in proportion to the sums of these counts over replicas.

        The k largest of a replica are among the k largest of each of its shards, so the search for
        the k-th runs over those. Header: the search and 8(S-1) bytes inside the shard group, and
        16 ceil(S/R)(R-1) bytes among R replicas.
        """
        largest, _ = top_k(acc, min(k, acc.numel()))
        threshold = max(kth_over_ranks(largest.values, k, self.comm), smallest_threshold(acc))
        mine = kernels.count_at_least(largest.values, [threshold]).long()
        counts = self.comm.all_gather_header(mine, stage="shares").view(-1)
        totals = replicas.all_reduce_header(counts, stage="shares")
        return share_out(k, to_host(totals)[0], self.limits)


def shard_group(comm: Comm, num_sparse: int, device: torch.device) -> ShardGroup:
    """The shards of the ranks of `comm`, where this one has `num_sparse` entries. Collective."""
    mine = to_device([num_sparse], torch.int64, device)
    return ShardGroup(comm, to_host(comm.all_gather_header(mine, stage="start").view(-1))[0])
