# SPDX-License-Identifier: Apache-2.0
"""`Comm.split`: subgroups over a process group and over simulated ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from oktopk import Reducer, simulate
from oktopk.comm.communicator import Comm
from oktopk.comm.failure import Closeable
from oktopk.comm.simulated import single_rank_comm
from oktopk.comm.torch_transport import MonitoredTransport, TorchTransport
from oktopk.errors import ExchangeError

CPU = torch.device("cpu")
PARTITIONS = {
    "halves": [[0, 1], [2, 3]],
    "interleaved": [[0, 2], [1, 3]],
    "unsorted and uneven": [[3, 0, 1], [2]],
    "all": [[0, 1, 2, 3]],
    "single ranks": [[0], [1], [2], [3]],
}


def use_a_split(where, groups: list[list[int]]) -> dict:
    """Use the subgroup, the group of all ranks, and the subgroup again."""
    comm = where if isinstance(where, Comm) else Comm(TorchTransport(where))
    part = comm.split(groups)
    members = part.all_gather_size(comm.rank, CPU, stage="a")
    everyone = comm.all_gather_size(comm.rank, CPU, stage="b")
    total = part.all_reduce_(torch.full((3,), float(comm.rank)), stage="c").tolist()
    received = part.exchange(
        {peer: torch.tensor([comm.rank], dtype=torch.int32) for peer in part.peers},
        dict.fromkeys(part.peers, 1),
        CPU,
        stage="d",
    )
    return {
        "rank": part.rank,
        "members": members,
        "everyone": everyone,
        "total": total,
        "received": {peer: words.tolist() for peer, words in received.items()},
        "header bytes": comm.ledger.stages["a"].sent,
    }


def expected(rank: int, groups: list[list[int]]) -> dict:
    members = sorted(next(group for group in groups if rank in group))
    peers = {index: [member] for index, member in enumerate(members) if member != rank}
    return {
        "rank": members.index(rank),
        "members": members,
        "everyone": [0, 1, 2, 3],
        "total": [float(sum(members))] * 3,
        "received": peers,
        "header bytes": 4 * (len(members) - 1),
    }


@pytest.mark.parametrize("name", PARTITIONS)
def test_subgroups_of_simulated_ranks(name):
    groups = PARTITIONS[name]
    for rank, got in enumerate(simulate(4, lambda comm: use_a_split(comm, groups))):
        assert got == expected(rank, groups)


@pytest.mark.parametrize("name", PARTITIONS)
def test_subgroups_of_a_process_group(worlds, name):
    groups = PARTITIONS[name]
    for rank, got in enumerate(worlds.run(4, use_a_split, groups)):
        assert got == expected(rank, groups)


def split_a_part_of_the_job(group) -> list[int]:
    """Ranks 0 to 2 of 4 have a group of their own, and split it without rank 3."""
    ranks, rank = dist.new_group([0, 1, 2]), dist.get_rank()
    counts: list[int] = [0] * 4
    dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names))
    if rank == 3:
        return []
    for _ in range(max(counts) - counts[rank]):  # earlier tests may have left different numbers
        dist.new_group([rank], use_local_synchronization=True)  # torch counts them: see `split`
    comm = Comm(TorchTransport(ranks))
    return comm.split([[0], [1, 2]]).all_gather_size(comm.rank, CPU, stage="a")


def test_a_group_of_some_ranks_is_split_without_the_others(worlds):
    assert worlds.run(4, split_a_part_of_the_job) == [[0], [1, 2], [1, 2], []]


def test_simulated_subgroups_run_apart_and_can_be_split_again():
    def main(comm: Comm) -> list[int]:
        half = comm.split([[0, 1, 2, 3], [4, 5, 6, 7]])
        for _ in range(comm.rank // 4):  # the halves call different numbers of collectives
            half.all_gather_size(0, CPU, stage="a")
        pair = half.split([[0, 2], [1, 3]])
        return pair.all_gather_size(comm.rank, CPU, stage="b")

    pairs = [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert simulate(8, main) == pairs


def test_a_method_runs_on_a_subgroup_as_on_a_group_of_that_size():
    def reduced(comm: Comm, seed: int) -> torch.Tensor:
        reducer = Reducer(500, density=0.1, comm=comm)
        grad = torch.randn(500, generator=torch.Generator().manual_seed(seed))
        reducer.reduce_(grad)
        return grad

    whole = simulate(2, lambda comm: reduced(comm, comm.rank))
    parts = simulate(4, lambda comm: reduced(comm.split([[0, 1], [2, 3]]), comm.rank % 2))
    assert all(torch.equal(part, whole[0]) for part in [whole[1], *parts])


def test_simulated_ranks_in_different_collectives_are_an_error_and_no_hang():
    def main(comm: Comm) -> None:
        part = comm.split([[0, 1], [2]])
        (comm if comm.rank == 1 else part).all_gather_size(0, CPU, stage="a")

    with pytest.raises(RuntimeError, match="never enter"):
        simulate(3, main)


@pytest.mark.parametrize("groups", [[[0]], [[0, 1], [1]], [[0, 1, 2]], [], [[-1, 0, 1]]])
def test_groups_must_have_each_rank_once(groups):
    def main(comm: Comm) -> None:
        with pytest.raises(ValueError, match="each rank below 2 once, got"):
            comm.split(groups)

    simulate(2, main)


def test_one_rank_can_be_split():
    assert single_rank_comm().split([[0]]).all_gather_size(7, CPU, stage="a") == [7]


class Broken(TorchTransport):
    """A transport that fails, without a process group; it notes what was closed."""

    rank, size = 0, 2

    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self.closed = name, closed

    def all_reduce_(self, x: torch.Tensor) -> None:
        raise ExchangeError("the connection is gone")

    def split(self, groups: list[list[int]]) -> Broken:
        return Broken("part", self.closed)

    def close(self) -> None:
        self.closed.append(self.name)


class Detector:
    """A failure detector that knows the cause already."""

    step, diagnosis = 0, None

    def abort(self, error: BaseException, connections: Closeable) -> None:
        connections.close()
        raise ExchangeError("rank 1 does not answer") from error

    def close(self) -> None: ...


def test_a_failure_in_a_subgroup_closes_the_group_it_was_split_from():
    """Ranks of other subgroups wait there for this rank: they must see that it has failed."""
    closed: list[str] = []
    part = MonitoredTransport(Broken("whole", closed), Detector()).split([[0, 1]])
    with pytest.raises(ExchangeError, match="rank 1 does not answer"):
        part.all_reduce_(torch.zeros(1))
    assert closed == ["whole"]
