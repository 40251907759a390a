# SPDX-License-Identifier: Apache-2.0
"""Ranks that compare what they are about to do: all raise the same error, or none does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from oktopk import simulate
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import (
    HEADER_BYTES,
    check_consistency,
    check_consistency_through_store,
    differences,
    ranks_text,
)
from oktopk.comm.simulated import SimulatedTransport
from oktopk.errors import ExchangeError, MessageError


def compared(store, facts: list[dict], late: int | None = None, calls: int = 1) -> list[str]:
    """What each rank is told; rank `late` comes when the others have given up."""

    def one(rank: int) -> str:
        for _ in range(calls):
            try:
                check_consistency_through_store(
                    lambda: store, rank, range(len(facts)), 30 if late is None else 0.1, facts[rank]
                )
            except (ValueError, ExchangeError) as error:
                return f"{type(error).__name__}: {error}"
        return "fine"

    with ThreadPoolExecutor(len(facts)) as pool:
        asked = {rank: pool.submit(one, rank) for rank in range(len(facts)) if rank != late}
        told = {rank: future.result(60) for rank, future in asked.items()}
    if late is not None:
        told[late] = one(late)
    return [told[rank] for rank in range(len(facts))]


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request, tmp_path):
    make = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(f"{tmp_path}/store", 3),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    return dist.PrefixStore("group", make[request.param]())


def test_every_rank_is_told_the_same_through_any_store(store):
    same, other = {"a": 1, "names": ["x"] * 40}, {"a": 2, "names": ["x"] * 41}
    assert compared(store, [same] * 3, calls=3) == ["fine"] * 3
    told = compared(store, [same, other, same])
    assert told[0].startswith(
        "ValueError: the ranks disagree: a is 1 on ranks 0, 2 but 2 on rank 1"
    )
    assert len(set(told)) == 1 and len(told[0]) < 200
    assert compared(store, [same] * 3) == ["fine"] * 3, "a failure does not disturb the next call"


def test_a_rank_that_comes_too_late_is_told_too(store):
    told = compared(store, [{"a": 1}] * 3, late=1)
    assert told[0].startswith("ExchangeError: rank 1 did not call attach within 0.1 s")
    assert len(set(told)) == 1


def test_no_rank_ends_with_the_store_before_the_others_have_read_the_error(store):
    def one(rank: int) -> int:
        with pytest.raises(ValueError, match="rank is 0 on rank 0 but 1 on rank 1, 2 on rank 2"):
            check_consistency_through_store(lambda: store, rank, range(3), 30, {"rank": rank})
        return store.add("oktopk.attach.1.read", 0)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, range(3))) == [3, 3, 3]


def test_a_store_that_is_gone_is_an_error_that_says_so():
    def gone() -> object:
        raise RuntimeError("connection refused")

    with pytest.raises(ExchangeError, match=r"rank 0: the store .* look there \(connection refu"):
        check_consistency_through_store(gone, 0, [0], 1.0, {})


def test_an_error_lists_a_few_ranks_and_a_few_differences():
    everyone = [{f"f{i}": rank > 0 for i in range(30)} for rank in range(300)]
    said = differences(everyone, range(300))
    assert "f0 is False on rank 0 but True on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 291 more;" in said
    assert said.endswith("; and 22 more differences") and len(said) < 1000
    assert differences([{"a": 1}, {}], range(2)) == "a is 1 on rank 0 but not set on rank 1"
    assert differences([{"a": 1}] * 3, range(3)) == differences([{}] * 2, range(2)) == ""


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 2], "ranks 0, 2"),
        (list(range(10)), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
    ],
)
def test_an_error_names_ranks(ranks, text):
    assert ranks_text(ranks) == text


def test_a_collective_compares_too_with_one_header():
    def main(comm: Comm) -> tuple[str, int]:
        values = {"names": ["x"] * 400, "k": 3 if comm.rank == 1 else 2}
        try:
            check_consistency(comm, torch.device("cpu"), values)
        except ValueError as error:
            return str(error), comm.ledger.total().header_sent
        return "", 0

    text = "the ranks disagree: k is 2 on ranks 0, 2 but 3 on rank 1"
    assert simulate(3, main) == [(text, 2 * HEADER_BYTES)] * 3


def test_equal_values_are_no_error():
    simulate(2, lambda comm: check_consistency(comm, torch.device("cpu"), {"a": [1, 2], "b": None}))


class GarblingTransport(SimulatedTransport):
    """Rank 1 sends bytes that no text has."""

    def all_to_all(self, x, out):
        super().all_to_all(torch.full_like(x, 255) if self.rank == 1 else x, out)


def test_a_damaged_handshake_names_the_rank_that_sent_it():
    def run(comm):
        check_consistency(comm, torch.device("cpu"), {"density": 0.1})

    with pytest.raises(MessageError, match=r"what came from rank 1 is no message"):
        simulate(3, run, transport=GarblingTransport)
