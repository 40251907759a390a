"""Regions: who reduces which index range, and the two phases built on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk import kernels, wire
from oktopk.comm import Comm, equal_shares
from oktopk.methods import riders
from oktopk.sparse import Sparse


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
    proposal = equal_bounds(local.numel, comm.size)[1:-1]
    if local.num:
        starts = torch.tensor(equal_bounds(local.num, comm.size)[1:-1], dtype=torch.int64)
        proposal = local.indices[starts.to(local.indices.device)].tolist()
    total = comm.sum_small(
        torch.tensor(proposal, dtype=torch.int64, device=local.values.device), stage="bounds"
    )
    return [0, *(total // comm.size).tolist(), local.numel]


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a rank owns after split-and-reduce."""

    region: Sparse
    """The sums of its region."""

    share: Tensor
    """The sums of its share of the riders."""

    outside: int
    """How many entries left this rank."""


def split_reduce(local: Sparse, rider: Tensor, bounds: list[int], comm: Comm) -> Reduced:
    """Send every entry to the owner of its region; sum my own region in rank order.

    One packed message per peer, lengths ahead. Sends 2k(P-1)/P words when the regions are even.
    """
    assert local.indices is not None
    cuts = torch.searchsorted(
        local.indices, torch.tensor(bounds[1:-1], dtype=torch.int32, device=local.indices.device)
    ).tolist()
    splits = [end - start for start, end in zip([0, *cuts], [*cuts, local.num], strict=True)]
    aboard = riders.to_rows(equal_shares(rider, comm.size))
    rows, incoming = comm.all_to_all(*riders.board(wire.pack(local), splits, aboard), stage="split")
    rows, lengths, aboard = riders.alight(rows, incoming, aboard.shape[1])
    indices, values = wire.unpack(rows, local.values.dtype)
    lo, hi = bounds[comm.rank], bounds[comm.rank + 1]
    region = kernels.merge(indices, values, lengths, lo, hi)
    parts = riders.to_values(aboard, -(-rider.numel() // comm.size), rider.dtype)
    return Reduced(
        Sparse(region.indices, region.values, local.numel),
        riders.in_rank_order(parts),
        local.num - splits[comm.rank],
    )


def gather_with_share(
    rows: Tensor, counts: list[int], share: Tensor, comm: Comm
) -> tuple[Tensor, Tensor]:
    """All ranks' rows in rank order, and all shares of the riders one after the other."""
    aboard = riders.to_rows(share.unsqueeze(0))
    mine, _ = riders.board(rows, [len(rows)], aboard)
    num = aboard.shape[1]
    everything = comm.gather_rows(mine, [count + num for count in counts], stage="gather")
    rows, _, aboard = riders.alight(everything, [count + num for count in counts], num)
    return rows, riders.to_values(aboard, share.numel(), share.dtype).view(-1)


def unpacked(rows: Tensor, like: Sparse) -> Sparse:
    """Rows back to a selection of the same vector."""
    return Sparse(*wire.unpack(rows, like.values.dtype), like.numel)
