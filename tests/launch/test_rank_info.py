# SPDX-License-Identifier: Apache-2.0
"""Devices and threads, chosen from what all ranks have."""

from __future__ import annotations

import pytest

from oktopk.launch.rendezvous import RankInfo, choose_device, choose_num_threads, cpu_quota


def info(host: str, cores: range, gpus: tuple[str, ...] = ()) -> RankInfo:
    return RankInfo(host, list(cores), list(gpus))


def test_ranks_of_a_host_share_its_cores(monkeypatch):
    monkeypatch.setattr("oktopk.launch.rendezvous.cpu_quota", lambda: float("inf"))
    shared = [info("a", range(16))] * 4 + [info("b", range(6))] * 4
    assert [choose_num_threads(rank, shared) for rank in (0, 3, 4)] == [4, 4, 1]
    bound = [info("a", range(4)), info("a", range(4, 12))]
    assert [choose_num_threads(rank, bound) for rank in (0, 1)] == [4, 8]
    monkeypatch.setattr("oktopk.launch.rendezvous.cpu_quota", lambda: 6.0)
    assert choose_num_threads(0, shared) == 1 and choose_num_threads(1, bound) == 3


@pytest.mark.parametrize(("text", "cores"), [("max 100000", float("inf")), ("250000 100000", 2.5)])
def test_the_cpu_quota_of_a_container_is_read(tmp_path, text, cores):
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path / "cpu.max") == cores


def test_all_ranks_use_gpus_or_none_does():
    def devices(*ranks: RankInfo) -> list[str]:
        return [str(choose_device(rank, list(ranks))) for rank in range(len(ranks))]

    core = range(1)
    assert devices(info("a", core), info("a", core)) == ["cpu", "cpu"]
    both, two = ("g0", "g1"), info("a", core, ("g0", "g1"))
    assert devices(two, two, info("b", core, both)) == ["cuda:0", "cuda:1", "cuda:0"]
    own = [info("a", core, (gpu,)) for gpu in both]
    assert devices(*own) == ["cuda:0", "cuda:0"], "a launcher left each rank its own"
    for ranks in ([own[0], own[0]], [two, info("b", core)], [two, two, two]):
        with pytest.warns(UserWarning, match="not one each: all run on CPUs"):
            assert set(devices(*ranks)) == {"cpu"}
