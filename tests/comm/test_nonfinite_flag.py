# SPDX-License-Identifier: Apache-2.0
"""The NaN flag that rides on sizes: it arrives with every header of sizes, and no size changes."""

from __future__ import annotations

import pytest
import torch

from oktopk import simulate
from oktopk.comm.communicator import Comm, equal_shares

CPU = torch.device("cpu")


def gather(comm: Comm, sizes: list[int]) -> list[int]:
    return comm.all_gather_size(sizes[comm.rank], CPU, stage="a")


def all_to_all(comm: Comm, sizes: list[int]) -> list[int]:
    return comm.all_to_all_sizes([sizes[comm.rank]] * comm.size, CPU, stage="a")


@pytest.mark.parametrize("collective", [gather, all_to_all])
@pytest.mark.parametrize("flagged", [None, 0, 2])
def test_one_ranks_flag_reaches_all_and_the_sizes_stay(collective, flagged):
    sizes = [0, 7, 2**31 - 1]

    def main(comm: Comm) -> tuple[list[int], bool, int]:
        comm.nonfinite = comm.rank == flagged
        received = collective(comm, sizes)
        return received, comm.nonfinite, comm.ledger.stages["a"].header_sent

    # a flag costs no byte: 4 for each of two peers, with it and without
    assert simulate(3, main) == [(sizes, flagged is not None, 8)] * 3


def test_a_flag_goes_from_rank_to_rank_with_a_single_size():
    def main(comm: Comm) -> tuple[list[int], bool]:
        comm.nonfinite = comm.rank == 0
        to, source = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        sizes = comm.send_recv_sizes([0], to, source, CPU, stage="a")
        return sizes, comm.nonfinite

    assert simulate(3, main) == [([0], True), ([0], True), ([0], False)]


def test_without_a_sender_a_rank_receives_0_and_no_flag():
    def main(comm: Comm) -> tuple[list[int], bool]:
        comm.nonfinite = comm.rank == 0
        ends = (1, None) if comm.rank == 0 else (None, 0)
        return comm.send_recv_sizes([5, 0], *ends, CPU, stage="a"), comm.nonfinite

    assert simulate(2, main) == [([0, 0], True), ([5, 0], True)]


def test_a_flag_stays_until_it_is_cleared():
    def main(comm: Comm) -> list[bool]:
        comm.nonfinite, seen = comm.rank == 1, []
        for clears in (False, True, False):
            gather(comm, [1, 1])
            seen.append(comm.nonfinite)
            comm.nonfinite = comm.nonfinite and not clears
        return seen

    assert simulate(2, main) == [[True, True, False]] * 2


@pytest.mark.parametrize(("numel", "size"), [(0, 3), (1, 3), (5, 2), (6, 3), (7, 1)])
def test_equal_shares_have_all_entries_and_zeros_at_the_end(numel, size):
    x = torch.arange(1, numel + 1)
    shares = equal_shares(x, size)
    assert shares.shape == (size, -(-numel // size))
    flat = shares.view(-1)
    assert flat[:numel].equal(x) and not flat[numel:].any()


@pytest.mark.parametrize("flagged", [None, 1])
def test_several_sizes_for_a_rank_travel_together(flagged):
    """Two for each rank: 8 bytes for each of two peers, in each of two collectives."""

    def main(comm: Comm) -> tuple:
        comm.nonfinite = comm.rank == flagged
        gathered = comm.all_gather_sizes([comm.rank, 7], CPU, stage="a")
        sent = [size for peer in range(3) for size in (10 * comm.rank + peer, peer)]
        swapped = comm.all_to_all_sizes(sent, CPU, stage="a")
        return gathered, swapped, comm.nonfinite, comm.ledger.stages["a"].header_sent

    for rank, found in enumerate(simulate(3, main)):
        swapped = [rank, rank, 10 + rank, rank, 20 + rank, rank]
        assert found == ([0, 7, 1, 7, 2, 7], swapped, flagged is not None, 32)
