"""Gather the result evenly: who sends how much, planned from the counts alone.

Every rank knows how many entries every rank kept. A rank over its even share hands what is too much
(the end of its run) to ranks below theirs; then all gather shares of equal size. Only the surplus
moves. What comes back is in index order, so the result is the same with and without balance.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import torch
from torch import Tensor

from oktopk.comm import Comm
from oktopk.methods.regions import gather_with_share

UNEVEN = 4  # the paper's rule: balance when the largest share is over 4 times the mean


def even_shares(total: int, size: int) -> list[int]:
    return [total // size + (rank < total % size) for rank in range(size)]


def surplus_moves(counts: list[int]) -> list[tuple[int, int, int]]:
    """(source, target, entries), ordered by source, then target. O(P)."""
    spare = [
        have - share
        for have, share in zip(counts, even_shares(sum(counts), len(counts)), strict=True)
    ]
    moves, target = [], 0
    for source in range(len(counts)):
        while spare[source] > 0:
            while spare[target] >= 0:
                target += 1
            num = min(spare[source], -spare[target])
            moves.append((source, target, num))
            spare[source] -= num
            spare[target] += num
    return moves


def entries_sent(counts: list[int], *, balanced: bool) -> list[int]:
    """Entries each rank sends to gather `counts`, with or without balance."""
    if not balanced:
        return [count * (len(counts) - 1) for count in counts]
    shares = even_shares(sum(counts), len(counts))
    return [
        max(count - share, 0) + share * (len(counts) - 1)
        for count, share in zip(counts, shares, strict=True)
    ]


def entry_bound(k: int, size: int) -> int:
    """The most entries a rank may send in one step: 3k(P-1)/P, that is 6k(P-1)/P words.

    Below k = 2P, k is taken up to the next multiple of P: no share is smaller than an entry.
    """
    if k < 2 * size:
        return 3 * -(-k // size) * (size - 1)
    return 3 * k * (size - 1) // size


def within_bound(counts: list[int], outside: list[int], k: int, *, balanced: bool) -> bool:
    """Whether no rank sends more than the bound; `outside` is what each has sent already."""
    bound = entry_bound(k, len(counts))
    sent = entries_sent(counts, balanced=balanced)
    return all(before + now <= bound for before, now in zip(outside, sent, strict=True))


def must_balance(counts: list[int], outside: list[int], k: int) -> bool:
    """The paper's rule, or earlier when direct sends would pass the bound.

    The rule is made for recursive doubling. With direct sends a share of twice the mean already
    costs 4k(P-1)/P words.
    """
    uneven = max(counts) * len(counts) > UNEVEN * sum(counts)
    return uneven or not within_bound(counts, outside, k, balanced=False)


def affordable(outside: list[int], k: int) -> int:
    """The largest result that balance can gather within the bound, wherever its entries lie."""
    size = len(outside)
    budget = entry_bound(k, size) - max(outside)

    def worst(total: int) -> int:  # one rank holds it all
        share = -(-total // size)
        return total - share + share * (size - 1)

    return bisect_right(range(1, k + 1), budget, key=worst)


def gather(
    rows: Tensor, counts: list[int], share: Tensor, comm: Comm, *, balanced: bool
) -> tuple[Tensor, Tensor]:
    """Everyone's rows in rank order, and the riders. Sends `entries_sent` rows, and riders."""
    if not balanced:
        return gather_with_share(rows, counts, share, comm)
    moves = surplus_moves(counts)
    shares = even_shares(sum(counts), comm.size)
    kept = min(counts[comm.rank], shares[comm.rank])
    received = _hand_over(rows[kept:], moves, comm)
    block = torch.cat([rows[:kept], received])
    blocks, rider = gather_with_share(block, shares, share, comm)
    return torch.cat(_in_rank_order(blocks, counts, moves)), rider


def _hand_over(surplus: Tensor, moves: list[tuple[int, int, int]], comm: Comm) -> Tensor:
    outgoing, incoming = [0] * comm.size, [0] * comm.size
    for source, target, num in moves:
        if source == comm.rank:
            outgoing[target] = num
        if target == comm.rank:
            incoming[source] = num
    return comm.all_to_all(surplus, outgoing, stage="balance", incoming=incoming)[0]


def _in_rank_order(
    blocks: Tensor, counts: list[int], moves: list[tuple[int, int, int]]
) -> list[Tensor]:
    """Cut gathered blocks into pieces, ordered as if nothing had moved."""
    shares = even_shares(sum(counts), len(counts))
    starts = [0, *accumulate(shares)][:-1]
    pieces, filled = {}, []
    for rank, (count, share) in enumerate(zip(counts, shares, strict=True)):
        filled.append(min(count, share))
        pieces[rank, -1] = blocks[starts[rank] : starts[rank] + filled[rank]]
    for source, target, num in moves:
        start = starts[target] + filled[target]
        pieces[source, target] = blocks[start : start + num]
        filled[target] += num
    return [pieces[key] for key in sorted(pieces)]
