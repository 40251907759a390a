"""Regions: who reduces which index range, and the two phases built on them."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk import kernels, wire
from oktopk.comm import Comm
from oktopk.sparse import Sparse


def equal_bounds(numel: int, size: int) -> list[int]:
    """The P+1 cut points of regions of equal width (they differ by one at most)."""
    return [rank * numel // size for rank in range(size + 1)]


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


def split_reduce(local: Sparse, bounds: list[int], comm: Comm) -> tuple[Sparse, int]:
    """Send every entry to the owner of its region; sum my own region in rank order.

    One packed message per peer, lengths ahead. Returns the summed region and how many entries left
    this rank. Sends 2k(P-1)/P words when the regions are even.
    """
    assert local.indices is not None
    cuts = torch.searchsorted(
        local.indices, torch.tensor(bounds[1:-1], dtype=torch.int32, device=local.indices.device)
    ).tolist()
    splits = [end - start for start, end in zip([0, *cuts], [*cuts, local.num], strict=True)]
    rows, incoming = comm.all_to_all(wire.pack(local), splits, stage="split")
    indices, values = wire.unpack(rows, local.values.dtype)
    lo, hi = bounds[comm.rank], bounds[comm.rank + 1]
    region = kernels.merge(indices, values, incoming, lo, hi)
    return Sparse(region.indices, region.values, local.numel), local.num - splits[comm.rank]


def unpacked(rows: Tensor, like: Sparse) -> Sparse:
    """Rows back to a selection of the same vector."""
    return Sparse(*wire.unpack(rows, like.values.dtype), like.numel)
