# SPDX-License-Identifier: Apache-2.0
"""FSDP2 inside a site, sparse between sites: the laws, against dense HSDP on a mesh of torch's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oktopk import METHODS, StepStats
from oktopk.comm.communicator import Traffic
from sites import MESHES, SPARSE, assert_same_bits, build, one_step, shards_of, train, whole

ALWAYS = ("dense", "topka", "oktopk")
over_meshes = pytest.mark.parametrize(("replicas", "ranks"), MESHES)


def by_place(answers: list, replicas: int) -> list[list]:
    """Answers of the ranks by replica and shard, as `init_device_mesh` numbers them."""
    shards = len(answers) // replicas
    return [answers[replica * shards : (replica + 1) * shards] for replica in range(replicas)]


# Density 1 is dense HSDP.


def assert_close(mine: dict, other: dict, tolerance: float) -> None:
    for name, value in mine.items():
        torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance)


@over_meshes
@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in METHODS],
)
def test_density_one_is_dense_hsdp(worlds, replicas, ranks, method):
    how = {"density": 1.0, "warmup_steps": 0, "method": method}
    reference = worlds.run(ranks, train, replicas, 10, None)
    ours = worlds.run(ranks, train, replicas, 10, how)
    assert_same_bits(ours)
    assert_close(ours[0], reference[0], 2e-6)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("replicas", "ranks"), [(2, 4), (4, 8), (2, 8)])
def test_density_one_is_dense_hsdp_for_100_steps(worlds, replicas, ranks):
    how = {"density": 1.0, "warmup_steps": 0}
    reference = worlds.run(ranks, in_float64, replicas, 100, None, timeout=120)
    ours = worlds.run(ranks, in_float64, replicas, 100, how, timeout=120)
    assert_same_bits(ours)
    assert_close(ours[0], reference[0], 1e-10)


def in_float64(group, replicas: int, steps: int, attached: dict | None) -> dict:
    """In float64: in fp32, 100 steps make more of the order of additions than rounding."""
    return train(group, replicas, steps, attached, dtype=torch.float64)


# A density of 2 % keeps the invariants.


@dataclass
class Exchanged:
    """One rank's step, by parameter, in float64."""

    acc: dict[str, Tensor]
    total: dict[str, Tensor]
    """What arrived, as the sum over replicas."""

    residual: dict[str, Tensor]
    stats: StepStats
    num_dense: int
    shares: list[int]


def exchanges(group, replicas: int, steps: int, attached: dict) -> tuple:
    """What SGD with a learning rate of 1 tells of every exchange, the weights and the traffic."""
    sgd = lambda p: torch.optim.SGD(p, lr=1.0)  # noqa: E731
    site = build(replicas, attached, dtype=torch.float64, optimizer=sgd)
    handle, done = site.handle, []
    driver, layout, flats = handle.driver, handle.driver.parameters, {}

    def note(exchange=driver.exchange) -> None:  # in float64 FSDP still divides after its hook
        flats.update({number: flat.clone() for number, flat in driver._reduced.flats.items()})
        exchange()

    driver.exchange = note
    for step in range(steps):
        weights, residuals = shards_of(site.model), dict(handle.residuals)
        residuals = {name: residual.clone() for name, residual in residuals.items()}
        one_step(site, step)
        moved = shards_of(site.model)
        each = Exchanged({}, {}, {}, site.stats[-1], 0, list(driver.engine.shares))
        each.num_dense = driver.engine.buckets.num_dense
        for number, module in enumerate(layout.modules):
            for name, x in layout.views(flats[number], list(module.parameters)).items():
                each.acc[name] = x + residuals.get(name, 0.0)
                each.total[name] = (weights[name] - moved[name]) * replicas
                each.residual[name] = handle.residuals.get(name, torch.zeros_like(x)).clone()
        done.append(each)
    traffic, weights = handle.traffic, whole(site.model)
    handle.close()
    return done, weights, traffic


def assert_nothing_is_lost(done: tuple[Exchanged, ...]) -> None:
    for name in done[0].acc:
        had = sum(each.acc[name] for each in done)
        have = done[0].total[name] + sum(each.residual[name] for each in done)
        torch.testing.assert_close(had, have, rtol=1e-9, atol=1e-12)


def assert_k_means_k(row: tuple[Exchanged, ...], method: str, k: int) -> None:
    """The shards of a replica keep k entries together, and agree on how many each of them keeps."""
    assert all(each.shares == row[0].shares for each in row)
    assert sum(row[0].shares) == k
    for each, share in zip(row, row[0].shares, strict=True):
        assert each.stats.k == share + each.num_dense
        assert each.stats.local <= each.stats.k
    local = sum(each.stats.local - each.num_dense for each in row)
    result = sum(each.stats.result - each.num_dense for each in row)
    assert 0.9 * k <= local <= k
    if METHODS[method].keeps_k:
        assert 0.9 * k <= result <= 1.1 * k


@over_meshes
@pytest.mark.parametrize("method", ["oktopk", "topka", "gtopk"])
def test_the_invariants_at_a_density_of_two_percent(worlds, replicas, ranks, method):
    assert_invariants(worlds, replicas, ranks, method)


@pytest.mark.parametrize("threads", [2, 4])
def test_the_invariants_with_several_threads_per_rank(worlds, threads):
    assert_invariants(worlds, 2, 4, "oktopk", threads=threads)


def assert_invariants(worlds, replicas: int, ranks: int, method: str, **more) -> None:
    steps, how = 12, SPARSE | {"method": method, "wire": "fp32"}
    answers = worlds.run(ranks, exchanges, replicas, steps, how, **more)
    assert_same_bits([weights for _, weights, _ in answers])
    grid = by_place([done for done, _, _ in answers], replicas)
    sparse = 4 * 49 * 49  # the square weights of two blocks; all else is tiny
    for step in range(steps):
        for column in zip(*grid, strict=True):
            assert_nothing_is_lost(tuple(rank[step] for rank in column))
        for row in grid:
            if step >= SPARSE["warmup_steps"] + 3:
                assert_k_means_k(tuple(rank[step] for rank in row), method, round(0.02 * sparse))


def test_the_ledger_counts_the_axes_apart(worlds):
    steps, how = 6, SPARSE | {"method": "oktopk"}
    paddings = []
    for done, _, traffic in worlds.run(4, exchanges, 2, steps, how):
        sent = sum(each.stats.bytes_sent for each in done)
        handshake = 1024 + 8 * (16 + 2)  # the first comparison of settings, and that of weights
        assert traffic["replicate"].sent == sent + handshake
        divided = sum(each.stats.stages.get("shares", Traffic()).sent for each in done)
        assert divided == 3 * 2 * 8  # three of the first four sparse steps; two rounds of a count
        inside = traffic["shard"]
        assert inside.payload_sent == 0 and inside.header_sent > 4 * steps
        padded = done[0].stats.numel  # FSDP sends its padding, too
        paddings.append(padded - sum(each.numel() for each in done[0].acc.values()))
        assert traffic["reduce-scatter"].sent == padded * 8 * steps
    assert paddings == [0, 275] * 2  # of an odd number of rows the last shard has one less


# A NaN on one rank.


def with_a_nan(group, replicas: int, on_nonfinite: str, density: float) -> tuple:
    """Three steps, in the second of which rank 3 has a NaN in one entry of its own shard."""
    how = SPARSE | {"on_nonfinite": on_nonfinite, "warmup_steps": 0, "density": density}
    site, weights, raised = build(replicas, how), [], False
    driver = site.handle.driver

    def take(number: int, flat: Tensor, real=driver.take) -> None:
        if driver.engine.step == 1 and dist.get_rank() == 3 and number == 1:
            flat[5] = float("nan")
        real(number, flat)

    driver.take = take
    for step in range(3):
        try:
            one_step(site, step)
        except FloatingPointError:
            raised = True
            site.optimizer.zero_grad()
        weights.append(shards_of(site.model))
    finite = all(residual.isfinite().all() for residual in site.handle.residuals.values())
    site.handle.close()
    return weights, site.handle.skipped_steps, raised, finite, [s.skipped for s in site.stats]


@over_meshes
@pytest.mark.parametrize("density", [0.02, 1.0])
@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_a_nan_on_one_rank_is_skipped_by_all_ranks(worlds, replicas, ranks, on_nonfinite, density):
    answers = worlds.run(ranks, with_a_nan, replicas, on_nonfinite, density)
    for weights, num_skipped, raised, finite, skipped in answers:
        assert num_skipped == 1 and skipped == [False, True, False] and finite
        assert raised == (on_nonfinite == "raise")
        assert all(x.isfinite().all() for x in weights[2].values())
    for column in zip(*by_place(answers, replicas), strict=True):
        assert_same_bits([weights[2] for weights, *_ in column])
