"""Gather the result evenly: who sends how much, planned from the counts alone.

Every rank knows how many entries every rank kept. A rank over its even share hands what is too much
(the end of its run) to ranks below theirs; then all gather shares of equal size. Only the surplus
moves. What comes back is in index order, so the result is the same with and without balance.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk.comm.communicator import Comm
from oktopk.sparse import Sparse
from oktopk.wire import codec, message
from oktopk.wire.codec import Form, Run

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


@dataclass(frozen=True, slots=True)
class Gathered:
    """What every rank has after the gather, the same bits on each."""

    result: Sparse
    rider: Tensor
    """All shares of the riders, one after the other."""

    lost: Sparse | None
    """What rounding took off the sums of this rank; None when the form loses nothing."""

    sent: int
    """Entries this rank sent, riders among them."""


def gather(
    kept: Sparse,
    counts: list[int],
    bounds: list[int],
    share: Tensor,
    comm: Comm,
    form: Form,
    *,
    balanced: bool = False,
) -> Gathered:
    """Everyone's sums in index order, and the riders. Sends `entries_sent` entries, and riders.

    A sum is encoded once, by its owner, and all ranks read those words: so all have the same bits.
    """
    dtype, rank = kept.values.dtype, comm.rank
    runs = _pieces(counts, bounds, surplus_moves(counts) if balanced else [])
    words, arriving = _encoded(
        kept, [(key, run) for key, run in runs.items() if key[0] == rank], form
    )
    if balanced:
        handed = {target: piece for (_, target), piece in words.items() if target != rank}
        sizes = {
            source: codec.num_words(run, form, dtype)
            for (source, holder), run in runs.items()
            if holder == rank != source
        }
        heard = comm.exchange(handed, sizes, share.device, stage="balance")
        words |= {(source, rank): piece for source, piece in heard.items()}
    held = [key for key in sorted(runs) if key[1] == rank]
    block = torch.cat([*(words[key] for key in held), share.contiguous().view(torch.int32)])
    indices, values, rider = _read_blocks(block, runs, share, comm, form)
    result = Sparse(indices, values, kept.numel)
    lost = None
    if form != "plain":
        lost = Sparse(kept.indices, kept.values - arriving, kept.numel)
    given = sum(run.count for (source, holder), run in runs.items() if source == rank != holder)
    sent = given + (comm.size - 1) * (sum(runs[key].count for key in held) + share.numel())
    return Gathered(result, rider, lost, sent)


Key = tuple[int, int]
"""The owner of a piece of the result, and who holds it when it is gathered."""


def _pieces(
    counts: list[int], bounds: list[int], moves: list[tuple[int, int, int]]
) -> dict[Key, Run]:
    """All pieces in index order: what an owner keeps comes before what it hands over."""
    left = list(counts)
    for source, _, num in moves:
        left[source] -= num
    keys = sorted(
        [(rank, -1, rank, num) for rank, num in enumerate(left)]
        + [(source, target, target, num) for source, target, num in moves]
    )
    return {
        (source, holder): Run(num, bounds[source], bounds[source + 1])
        for source, _, holder, num in keys
    }


def _encoded(
    kept: Sparse, mine: list[tuple[Key, Run]], form: Form
) -> tuple[dict[Key, Tensor], Tensor]:
    """My pieces as words, and all my values as they will arrive."""
    assert kept.indices is not None
    num = [run.count for _, run in mine]
    words, arriving = {}, []
    for (key, run), indices, values in zip(
        mine, kept.indices.split(num), kept.values.split(num), strict=True
    ):
        words[key], arrives = message.write(indices, values, run, form, values[:0])
        arriving.append(arrives)
    return words, torch.cat(arriving)


def _read_blocks(
    block: Tensor, runs: dict[Key, Run], share: Tensor, comm: Comm, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """Send my block to all; the indices, values and riders of all blocks, in index order."""
    dtype = share.dtype
    held = {rank: [key for key in sorted(runs) if key[1] == rank] for rank in range(comm.size)}
    widths = {
        rank: [
            *(codec.num_words(runs[key], form, dtype) for key in keys),
            share.numel() * codec.words_per_value(dtype),
        ]
        for rank, keys in held.items()
    }
    sizes = {rank: sum(widths[rank]) for rank in comm.peers}
    blocks = comm.exchange(dict.fromkeys(comm.peers, block), sizes, block.device, stage="gather")
    blocks[comm.rank] = block
    indices, index_parts, values, value_parts = codec.room(list(runs.values()), share)
    place = {key: number for number, key in enumerate(runs)}
    riders = []
    for rank, keys in held.items():
        *parts, rider = blocks[rank].split(widths[rank])
        for key, words in zip(keys, parts, strict=True):
            number = place[key]
            codec.decode(words, runs[key], form, index_parts[number], value_parts[number])
        riders.append(rider.clone().view(dtype))
    return indices, values, torch.cat(riders)
