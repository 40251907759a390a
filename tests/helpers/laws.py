"""The laws as functions over what the ranks did, for real and simulated ranks alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk import (
    METHODS,
    Reducer,
    StepStats,
    simulate,
)
from oktopk.comm.communicator import Comm
from streams import STREAMS


@dataclass
class Step:
    """One rank's step. `total` is the result as the sum over ranks, rebuilt from the average."""

    acc: Tensor
    total: Tensor
    residual: Tensor
    stats: StepStats


def trajectory(
    where, method: str, n: int, density: float, stream: str, steps: int, dtype=torch.float64, **more
) -> list[Step]:
    """Run a reducer over a stream on one rank; `where` is a process group or a `Comm`."""
    place = {"comm": where} if isinstance(where, Comm) else {"group": where}
    reducer = Reducer(n, method=method, density=density, **place, **more)
    rank, size = reducer.comm.rank, reducer.comm.size
    done = []
    for step in range(steps):
        grad = STREAMS[stream](n, rank, step).to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        acc = grad.to(wide) + reducer.residual.to(wide)
        stats = reducer.reduce_(grad)
        residual = reducer.residual.to(torch.float64, copy=True)
        done.append(Step(acc.double(), grad.double() * size, residual, stats))
    return done


def simulated(size: int, *args, **more) -> list[list[Step]]:
    """The trajectories of `size` simulated ranks."""
    return simulate(size, lambda comm: trajectory(comm, *args, **more))


def assert_nothing_is_lost(ranks: list[list[Step]], tolerance: float) -> None:
    """Sum of acc = result + sum of residuals; tolerance 0 asks for the very bits."""
    for step, done in enumerate(zip(*ranks, strict=True)):
        had = sum(rank.acc for rank in done)
        total = done[0].total if tolerance else done[0].total.round()
        have = total + sum(rank.residual for rank in done)
        scale = max(1.0, *(float(rank.acc.abs().max()) if len(rank.acc) else 0.0 for rank in done))
        worst = float((had - have).abs().max()) if len(had) else 0.0
        assert worst <= tolerance * scale, f"step {step}: {worst} lost"


def assert_all_agree(ranks: list[list[Step]]) -> None:
    for step, done in enumerate(zip(*ranks, strict=True)):
        for rank, other in enumerate(done[1:], 1):
            assert torch.equal(done[0].total, other.total), f"step {step}: rank {rank} differs"


def assert_k_means_k(ranks: list[list[Step]], method: str, after: int = 3) -> None:
    """|local| within 10 % of k and never over it; |result| too where the method keeps k."""
    for done in ranks:
        for step in done[after:]:
            stats = step.stats
            assert 0.9 * stats.k <= stats.local <= stats.k, stats
            if METHODS[method].keeps_k:
                assert 0.9 * stats.k <= stats.result <= 1.1 * stats.k, stats


def oktopk_headers(size: int, value_bytes: int, *, exact: bool, bounds: bool) -> set[int]:
    """Header bytes `oktopk` may send per rank in a step: the formula of docs/algorithms.md.

    A step that is not due for exact thresholds may find that it needs them, and one more search may
    follow to stay within the bound on words.
    """
    peers = size - 1
    sizes = 4 * peers
    ladder = 0 if exact else 4 * 13 * peers
    search = 4 * 3 * peers + value_bytes * 2 * 4 * -(-256 // size) * peers
    agreement = 2 * 8 * peers if bounds else 0
    fewest = 1 if exact else 0
    return {sizes + ladder + agreement + num * search for num in range(fewest, 3)}


def assert_bill_is_bounded(
    ranks: list[list[Step]], value_bytes: int = 8, is_sized_by_count: bool = True
) -> None:
    """`oktopk`: at most 6k(P-1)/P words of payload (k up to a multiple of P), bounded headers."""
    size = len(ranks)
    most = max(oktopk_headers(size, value_bytes, exact=False, bounds=True))
    if not is_sized_by_count:  # a size for each message of the split and for each piece gathered
        most += 4 * (1 + size) * (size - 1)
    for done in ranks:
        for step in done:
            stats = step.stats
            k = stats.k if stats.k >= 2 * size else -(-stats.k // size) * size
            entries = 3 * k * (size - 1) // size
            assert stats.bytes_sent - stats.bytes_header <= entries * (4 + value_bytes), stats
            assert stats.bytes_header <= most, stats
