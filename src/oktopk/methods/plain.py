# SPDX-License-Identifier: Apache-2.0
"""Ok-Topk in plain lines, to be read beside the paper: one step over a list of vectors, one a rank.

It is what `oktopk` does in a step with exact thresholds, where messages are plain: the same bits on
every rank, and the same entries sent (tests/methods/test_plain.py). Nothing here is fast, and
nothing is sent. Li and Hoefler, PPoPP 2022, Algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PlainStep:
    """What a step gives."""

    average: Tensor
    """The gradient that every rank applies: the sums that were kept, divided by P."""

    residuals: list[Tensor]
    """For each rank, what it keeps for the next step."""

    num_sent: list[int]
    """For each rank, the entries that it sent: at most 3k(P-1)/P, two words each."""


def ok_topk(grads: list[Tensor], residuals: list[Tensor], k: int) -> PlainStep:
    """One step of Ok-Topk on P ranks."""
    accs = [residual + grad for grad, residual in zip(grads, residuals, strict=True)]
    numel, size = accs[0].numel(), len(accs)
    offered = [top_k(acc, k) for acc in accs]  # indices, by the local thresholds
    bounds = region_bounds(offered, numel)

    # split and reduce: every entry goes to the owner of its region, who adds in the order of ranks
    sums, is_sum = torch.zeros_like(accs[0]), torch.zeros(numel, dtype=torch.bool)
    for acc, indices in zip(accs, offered, strict=True):
        sums[indices] += acc[indices]
        is_sum[indices] = True
    owner = torch.searchsorted(torch.tensor(bounds[1:-1]), torch.arange(numel), right=True)
    num_sent = [int((owner[mine] != rank).sum()) for rank, mine in enumerate(offered)]

    # balance and allgatherv: the k largest sums of all regions go to everyone, in equal shares
    candidates = is_sum.nonzero().squeeze(1)
    kept = candidates[top_k(sums[candidates], k, zeros=True)]
    counts = torch.bincount(owner[kept], minlength=size).tolist()
    shares = [kept.numel() // size + (rank < kept.numel() % size) for rank in range(size)]
    direct = [n + count * (size - 1) for n, count in zip(num_sent, counts, strict=True)]
    uneven = max(counts) * size > 4 * kept.numel()  # the paper's rule
    if uneven or max(direct) > 3 * k * (size - 1) / size:  # surplus moves to others first
        num_sent = [
            before + max(count - share, 0) + share * (size - 1)
            for before, count, share in zip(num_sent, counts, shares, strict=True)
        ]
    else:
        num_sent = direct

    # an entry leaves the residual of a rank that sent it, if its sum was kept
    average = torch.zeros_like(sums)
    average[kept] = sums[kept] / size
    for acc, indices in zip(accs, offered, strict=True):
        acc[indices[torch.isin(indices, kept)]] = 0
    return PlainStep(average, accs, num_sent)


def top_k(values: Tensor, k: int, *, zeros: bool = False) -> Tensor:
    """Where the k largest magnitudes are, ascending; ties go to the lower index. A zero is selected
    only where it may be a sum that cancelled (`zeros`)."""
    order = values.abs().sort(descending=True, stable=True).indices[:k]
    return (order if zeros else order[values[order] != 0]).sort().values


def region_bounds(offered: list[Tensor], numel: int) -> list[int]:
    """P+1 cut points of the regions: the mean of those that cut each rank's selection evenly."""
    size = len(offered)
    if any(mine.numel() == 0 for mine in offered):
        raise ValueError("a rank has offered nothing: plain Ok-Topk needs gradients that are not 0")
    proposals = [mine[[r * mine.numel() // size for r in range(1, size)]] for mine in offered]
    return [0, *(torch.stack(proposals).sum(0) // size).tolist(), numel]
