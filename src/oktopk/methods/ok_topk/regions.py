"""Regions: who reduces which index range, and the first of the two phases built on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm, equal_shares
from oktopk.sparse import Sparse
from oktopk.utils.device import to_device, to_host
from oktopk.wire import message
from oktopk.wire.codec import Form, Run


def equal_bounds(numel: int, size: int) -> list[int]:
    """The P+1 cut points of regions of equal width (they differ by one at most)."""
    return [rank * numel // size for rank in range(size + 1)]


def one_owner_bounds(numel: int, size: int) -> list[int]:
    """Rank 0 owns everything.

    With five ranks or fewer, ranks whose gradients lie in each other's regions cannot have a full
    result within the bound on words. With one owner they can: it sends nothing in split-and-reduce.
    """
    return [0, *[numel] * size]


def agreed_bounds(local: Sparse, comm: Comm) -> list[int]:
    """Cut points that give every region about the same number of selected entries.

    Each rank proposes the cuts that split its own selection into P equal runs; the mean is taken,
    in int64. Means of ascending lists ascend. Header: P-1 int64, summed.
    """
    assert local.indices is not None
    if local.num:
        starts = equal_bounds(local.num, comm.size)[1:-1]
        proposal = local.indices[to_device(starts, torch.int64, local.values.device)].long()
    else:
        equal = equal_bounds(local.numel, comm.size)[1:-1]
        proposal = to_device(equal, torch.int64, local.values.device)
    (total,) = to_host(comm.sum_small(proposal, stage="bounds"))
    return [0, *(cut // comm.size for cut in total), local.numel]


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a rank owns after split-and-reduce."""

    region: Sparse
    """The sums of its region."""

    offered: Sparse
    """What this rank gave, as it arrived."""

    share: Tensor
    """The sums of its share of the riders."""

    outside: int
    """How many entries left this rank."""


def split_reduce(
    local: Sparse, rider: Tensor, bounds: list[int], comm: Comm, form: Form
) -> Reduced:
    """Send every entry to the owner of its region; sum my own region in rank order.

    One letter per peer, counts ahead. Sends 2k(P-1)/P words when plain and the regions are even.
    """
    assert local.indices is not None
    dtype, rank = local.values.dtype, comm.rank
    splits = _splits(local, bounds)
    incoming = comm.swap_sizes(splits, local.values.device, stage="split")
    shares = equal_shares(rider, comm.size)
    outgoing: dict[int, Tensor] = {}
    arriving = list(local.values.split(splits))  # my own entries need no rounding
    indices = local.indices.split(splits)
    for peer in comm.peers:
        run = Run(splits[peer], bounds[peer], bounds[peer + 1])
        outgoing[peer], arriving[peer] = message.write(
            indices[peer], arriving[peer], run, form, shares[peer]
        )
    lo, hi = bounds[rank], bounds[rank + 1]
    runs = [Run(count, lo, hi) for count in incoming]
    sizes = {peer: message.size(runs[peer], form, dtype, shares.shape[1]) for peer in comm.peers}
    heard = comm.exchange(outgoing, sizes, local.values.device, stage="split")
    own = rank, indices[rank], arriving[rank], shares[rank]
    where, what, share = message.read_all(heard, runs, form, own)
    region = kernels.merge(where, what, incoming, lo, hi)
    return Reduced(
        Sparse(region.indices, region.values, local.numel),
        local if form == "plain" else Sparse(local.indices, torch.cat(arriving), local.numel),
        share,
        local.num - splits[rank],
    )


def _splits(local: Sparse, bounds: list[int]) -> list[int]:
    """How many entries lie in each region."""
    assert local.indices is not None
    inner = to_device(bounds[1:-1], torch.int32, local.indices.device)
    (cuts,) = to_host(torch.searchsorted(local.indices, inner))
    return [end - start for start, end in zip([0, *cuts], [*cuts, local.num], strict=True)]
