# SPDX-License-Identifier: Apache-2.0
"""What a flat vector is made of: buckets, groups of them, and shards of a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.methods.balance import kth_over_ranks
from oktopk.methods.base import SparseSum
from oktopk.methods.selection import smallest_threshold, top_k
from oktopk.sparse import Sparse
from oktopk.utils.device import to_device, to_host

# How a model's gradient is cut into buckets, and which buckets are exchanged together.


MAX_INDEXABLE = 2**31 - 1  # entries that can be selected together: their indices are int32

Layout = list[list[str]]
"""The names of the parameters in every bucket, in the order of their gradients."""

Range = tuple[int, int]
"""Begin and end of a parameter within its bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A part of the gradient: its size, and the ranges in it that travel dense."""

    numel: int
    dense: tuple[Range, ...] = ()
    may_be_unused: tuple[Range, ...] = ()
    """Ranges of parameters that may have no gradient in a step on any rank."""

    @property
    def num_dense(self) -> int:
        return sum(end - start for start, end in self.dense)


@dataclass(frozen=True)
class Buckets:
    """All buckets of a model, one after the other in a flat vector, and their groups."""

    items: tuple[Bucket, ...]
    groups: tuple[range, ...]
    """Consecutive buckets that are exchanged together."""

    @cached_property
    def starts(self) -> list[int]:
        """Where each bucket begins in the flat vector; the last item is the end."""
        return list(accumulate((bucket.numel for bucket in self.items), initial=0))

    @property
    def numel(self) -> int:
        return self.starts[-1]

    @property
    def numels(self) -> list[int]:
        return [bucket.numel for bucket in self.items]

    @cached_property
    def num_dense(self) -> int:
        """Entries that travel dense, in all buckets."""
        return sum(bucket.num_dense for bucket in self.items)

    @property
    def everything(self) -> range:
        return range(len(self.items))

    def num_sparse(self, group: range) -> int:
        """Entries of a group that travel sparse."""
        return sum(self.items[b].numel - self.items[b].num_dense for b in group)

    def part(self, flat: Tensor, group: range) -> Tensor:
        """The part of a flat vector that belongs to a group of buckets, as a view."""
        return flat[self.starts[group.start] : self.starts[group.stop]]


def grouped(buckets: list[Bucket], min_numel: int) -> Buckets:
    """Group consecutive buckets until each group has `min_numel` entries; the last may have fewer.

    DDP hands over buckets in order, so a group is complete with its last bucket.
    """
    groups, start, numel = [], 0, 0
    for number, bucket in enumerate(buckets):
        numel += bucket.numel
        if numel >= min_numel or number + 1 == len(buckets):
            groups.append(range(start, number + 1))
            start, numel = number + 1, 0
    return Buckets(tuple(buckets), tuple(groups))


def check_indexable(numels: list[int], scope: str) -> None:
    """Raise where buckets that are selected together have more entries than int32 can index."""
    whole = scope == "model"
    together = sum(numels) if whole else max(numels, default=0)
    if together > MAX_INDEXABLE:
        advice = "use scope='bucket'" if whole else "use a smaller bucket_cap_mb, warmup_steps=4"
        raise ValueError(
            f"{'the model' if whole else 'a bucket'} has {together} trainable entries, and no more "
            f"than {MAX_INDEXABLE} can be selected together, as indices are int32: {advice} or "
            "method='dense', or freeze some parameters"
        )


def split_at(selections: list[Sparse], edges: list[int]) -> list[list[Sparse]]:
    """Split each selection at the edges, as views; indices stay as they are.

    All cut points are read in one transfer, so that the host waits for the device once.
    """
    inner = to_device(edges[1:-1], torch.int32, selections[0].indices.device)
    cuts = to_host(*(torch.searchsorted(each.indices, inner) for each in selections))
    return [
        [
            Sparse(sparse.indices[start:end], sparse.values[start:end], hi)
            for start, end, hi in zip([0, *its], [*its, sparse.num], edges[1:], strict=True)
        ]
        for sparse, its in zip(selections, cuts, strict=True)
    ]


def by_bucket(sums: SparseSum, group: range, buckets: Buckets) -> dict[int, SparseSum]:
    """Split the sums of a group into those of its buckets."""
    if len(group) == 1:
        return {group.start: sums}
    members = buckets.items[group.start : group.stop]
    dense_parts = sums.dense_part.split([bucket.num_dense for bucket in members])
    edges = list(accumulate((bucket.numel for bucket in members), initial=0))
    together = [sums.result, sums.sent, *sums.corrections]
    parts = {}
    for i, (result, sent, *corrections) in enumerate(zip(*split_at(together, edges), strict=True)):
        parts[group.start + i] = SparseSum(
            result,
            sent,
            dense_parts[i],
            corrections=tuple(corrections),
            imbalance=sums.imbalance,
            num_sent=0 if i else sums.num_sent,  # counted once, with the first bucket
            offset=edges[i],
        )
    return parts


def share_out(total: int, weights: list[int], limits: list[int]) -> list[int]:
    """Divide `total` into whole numbers by weight, none above its limit.

    Integers only: every rank gets the same shares from the same weights.
    """
    weight = sum(weights) or 1
    shares = [min(total * w // weight, limit) for w, limit in zip(weights, limits, strict=True)]
    left = min(total, sum(limits)) - sum(shares)
    # rounding leaves less than one for each; more is left only where a share is at its limit
    for amount in (1, left):
        for i in sorted(range(len(shares)), key=lambda i: -weights[i]):
            take = min(amount, limits[i] - shares[i], left)
            shares[i] += take
            left -= take
    return shares


# How a model that is sharded over ranks keeps k entries of the whole, and agrees to apply a step.
#
# With FSDP2, a rank has one shard of the gradient and exchanges it with the ranks that have the
# same shard of other replicas. Each shard is a vector of its own with its own exchange. Two things
# concern all shards: the k largest entries of the whole model are not equally many in every shard,
# and a NaN in one shard must keep all ranks from applying the step.


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
