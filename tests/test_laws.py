"""The laws over every method, in real processes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from laws import (
    assert_all_agree,
    assert_k_means_k,
    assert_nothing_is_lost,
    trajectory,
)
from oktopk import METHODS
from streams import STREAMS
from worlds import SIZES

N, DENSITY, STEPS = 2000, 0.02, 100
over_methods = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def long_run(world):
    """Many steps of whole numbers, threshold steps included; kept for the laws that look at it."""

    def run(P, method):
        steps = STEPS if method == "oktopk" or P == 3 else 12
        return world.run(P, trajectory, method, N, DENSITY, "whole", steps)

    return cache(run)


@over_methods
@pytest.mark.parametrize("P", SIZES)
class TestInRealProcesses:
    def test_nothing_is_lost(self, long_run, P, method):
        assert_nothing_is_lost(long_run(P, method), tolerance=0)

    def test_all_ranks_agree_bit_for_bit(self, long_run, P, method):
        assert_all_agree(long_run(P, method))

    def test_k_means_k(self, long_run, P, method):
        if method != "dense":
            assert_k_means_k(long_run(P, method), method)

    def test_fp32_loses_nothing_but_rounding(self, world, P, method):
        steps = STEPS if (method, P) == ("oktopk", 3) else 6
        ranks = world.run(P, trajectory, method, N, DENSITY, "heavy", steps, torch.float32)
        assert_nothing_is_lost(ranks, tolerance=1e-6)
        assert_all_agree(ranks)

    def test_tiny_gradients(self, world, P, method):
        for n, density in [(0, 0.5), (1, 0.01), (3, 0.4), (7, 1.0)]:
            ranks = world.run(P, trajectory, method, n, density, "gaussian", 3)
            assert_nothing_is_lost(ranks, tolerance=1e-12)
            assert_all_agree(ranks)

    def test_odd_gradients(self, world, P, method):
        for stream in ("zeros", "ties", "some_ranks_empty", "skewed", "cancelling"):
            ranks = world.run(P, trajectory, method, 400, 0.05, stream, 4)
            assert_nothing_is_lost(ranks, tolerance=1e-12)
            assert_all_agree(ranks)

    def test_density_one_is_the_mean(self, world, P, method):
        for stream, steps in (("gaussian", 2), ("cancelling", 3), ("ties", 2)):
            ranks = world.run(P, trajectory, method, 200, 1.0, stream, steps)
            for step in range(steps):
                mean = sum(STREAMS[stream](200, rank, step) for rank in range(P)) / P
                torch.testing.assert_close(ranks[0][step].total / P, mean)
                assert not ranks[0][step].residual.any()


@over_methods
def test_laws_hold_for_two_million_elements(world, method):
    ranks = world.run(4, trajectory, method, 2_000_000, 0.01, "gaussian", 2, torch.float32)
    assert_nothing_is_lost(ranks, tolerance=1e-6)
    assert_all_agree(ranks)
