"""How a model's gradient is cut into buckets, and what belongs to which."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from oktopk.methods import Exchanged
from oktopk.sparse import Sparse
from oktopk.utils.device import to_device, to_host

MOST = 2**31 - 1  # entries that are selected together: their indices are int32


@dataclass(frozen=True, slots=True)
class Bucket:
    """A part of the gradient: its size, and the ranges in it that travel dense."""

    numel: int
    dense: tuple[tuple[int, int], ...] = ()
    may_be_unused: tuple[tuple[int, int], ...] = ()
    """Ranges of parameters that may have no gradient in a step on any rank."""

    @property
    def num_dense(self) -> int:
        return sum(end - start for start, end in self.dense)


def grouped(buckets: list[Bucket], least: int) -> list[range]:
    """Consecutive buckets with at least so many entries together; the last may have fewer.

    Buckets come in order: a group is complete with its last.
    """
    groups, start, numel = [], 0, 0
    for number, bucket in enumerate(buckets):
        numel += bucket.numel
        if numel >= least or number + 1 == len(buckets):
            groups.append(range(start, number + 1))
            start, numel = number + 1, 0
    return groups


def check_indexable(numels: list[int], scope: str) -> None:
    """Raise where entries of buckets are selected together that are more than int32 can index."""
    whole = scope == "model"
    together = sum(numels) if whole else max(numels, default=0)
    if together > MOST:
        advice = "use scope='bucket'" if whole else "use a smaller bucket_cap_mb, warmup_steps=4"
        raise ValueError(
            f"{'the model' if whole else 'a bucket'} has {together} trainable entries, and no more "
            f"than {MOST} can be selected together, as indices are int32: {advice} or "
            "method='dense', or freeze some parameters"
        )


def cut_up(sparses: list[Sparse], edges: list[int]) -> list[list[Sparse]]:
    """Each at the edges, as views: indices stay as they are. The host waits once for all."""
    indices = [sparse.indices for sparse in sparses if sparse.indices is not None]
    inner = to_device(edges[1:-1], torch.int32, indices[0].device)
    cuts = to_host(*(torch.searchsorted(each, inner) for each in indices))
    return [
        [
            Sparse(where[start:end], sparse.values[start:end], hi)
            for start, end, hi in zip([0, *its], [*its, sparse.num], edges[1:], strict=True)
        ]
        for sparse, where, its in zip(sparses, indices, cuts, strict=True)
    ]


def by_bucket(exchanged: Exchanged, group: range, buckets: list[Bucket]) -> dict[int, Exchanged]:
    """What a group of buckets exchanged together, by bucket."""
    if len(group) == 1:
        return {group.start: exchanged}
    members = buckets[group.start : group.stop]
    sums = exchanged.rider.split([bucket.num_dense for bucket in members])
    edges = list(accumulate((bucket.numel for bucket in members), initial=0))
    whole = [exchanged.result, exchanged.offered, *exchanged.returned]
    parts = {}
    for i, (result, offered, *returned) in enumerate(zip(*cut_up(whole, edges), strict=True)):
        parts[group.start + i] = Exchanged(
            result,
            offered,
            sums[i],
            tuple(returned),
            exchanged.imbalance,
            0 if i else exchanged.sent,  # all of it, once
            edges[i],
        )
    return parts


def share_out(total: int, weights: list[int], most: list[int]) -> list[int]:
    """Share `total` by weight in whole numbers, none over its `most`.

    Integers only: every rank gets the same shares from the same weights.
    """
    weight = sum(weights) or 1
    shares = [min(total * w // weight, m) for w, m in zip(weights, most, strict=True)]
    left = min(total, sum(most)) - sum(shares)
    # rounding leaves less than one each; more is left only where a bucket is full
    for amount in (1, left):
        for i in sorted(range(len(shares)), key=lambda i: -weights[i]):
            take = min(amount, most[i] - shares[i], left)
            shares[i] += take
            left -= take
    return shares


Layout = list[list[str]]
"""The names of the parameters in every bucket, in the order of their gradients."""
