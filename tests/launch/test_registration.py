# SPDX-License-Identifier: Apache-2.0
"""Registration, with ranks as threads at a store in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from oktopk.errors import LaunchError
from oktopk.launch.ranks import RankEnvironment
from oktopk.launch.rendezvous import RankInfo, register

Registered = tuple[dist.Store, list[RankInfo]] | str


def registered(
    store: dist.Store, settings: list[dict[str, object]], size: int | None = None
) -> list[Registered]:
    """What each rank gets: its store and all ranks, or the text of its error."""
    size = size or len(settings)

    def one(rank: int) -> Registered:
        env = RankEnvironment("test", rank, size, rank, size)
        try:
            return register(store, env, 0.3 if len(settings) < size else 30, settings[rank])
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(settings)) as pool:
        return list(pool.map(one, range(len(settings))))


def test_all_ranks_get_the_information_of_all():
    results = registered(dist.HashStore(), [{"lr": 0.1}] * 3)
    assert not any(isinstance(result, str) for result in results)
    stores, ranks = zip(*results, strict=True)
    assert ranks[0] == ranks[1] == ranks[2] and len(ranks[0]) == 3
    assert len({info.nonce for info in ranks[0]}) == 3
    stores[0].set("key", "value")
    assert stores[2].get("key") == b"value", "the ranks share a part of the store"


def test_a_second_start_at_the_same_store_gets_a_part_of_its_own():
    """torchrun keeps its store when it restarts workers."""
    store = dist.HashStore()
    first, second = (registered(store, [{}] * 2)[0] for _ in range(2))
    assert not isinstance(first, str) and not isinstance(second, str)
    first[0].set("key", "old")
    assert not second[0].check(["key"])
    assert {info.nonce for info in first[1]}.isdisjoint(info.nonce for info in second[1])


def test_different_settings_are_the_same_error_on_all_ranks():
    same = {"lr": 0.1, "method": "oktopk", "rates": ("none",)}
    results = registered(dist.HashStore(), [same, same | {"lr": 0.2}, same, {"lr": 0.1}])
    assert (
        results
        == [
            "the ranks were started with different settings: lr is 0.1 on ranks 0, 2, 3 but 0.2 on "
            "rank 1; method is oktopk on ranks 0, 1, 2 but not set on rank 3; rates is ['none'] on "
            "ranks 0, 1, 2 but not set on rank 3. Give all ranks the same flags"
        ]
        * 4
    )


def test_missing_ranks_are_named_on_all_others():
    results = registered(dist.HashStore(), [{}, {"lr": 1}], size=4)
    assert results == [
        f"rank {rank} of 4, started by test: ranks [2, 3] did not register within 0.3 s"
        for rank in range(2)
    ]


def test_a_store_without_rank_0_is_an_error():
    env = RankEnvironment("test", 1, 2, 1, 2)
    with pytest.raises(LaunchError, match=r"rank 0 did not open the registration within 0\.1 s"):
        register(dist.HashStore(), env, 0.1, {})
