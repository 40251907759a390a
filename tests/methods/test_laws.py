# SPDX-License-Identifier: Apache-2.0
"""The laws over every method and adapter, in real processes, with one thread per rank and several.

`flat` is a `Reducer`; the laws of DDP's adapter are in tests/adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch

from laws import (
    WAYS,
    assert_all_agree,
    assert_k_means_k,
    assert_nothing_is_lost,
    local_steps_trajectory,
    trajectory,
)
from oktopk import METHODS
from streams import STREAMS
from worlds import MIXED, SIZES

N, DENSITY, STEPS = 2000, 0.02, 100

# ranks, and threads of each; the others are in `make test-slow`
ALWAYS = [(1, 1), (2, 1), (3, 1), (1, 4), (3, 2), (3, 4), (3, MIXED)]
ALL = [(P, num) for P in SIZES for num in (1, 2, 4, MIXED)]
SLOW = [case for case in ALL if case not in [*ALWAYS, (1, MIXED)]]
FEW, MORE = [(2, 1), (2, 4)], [(1, 1), (3, 1), (4, 1), (3, 4)]
"""Of the other adapters, in `make test` and in `make test-slow`."""


@dataclass(frozen=True)
class Adapter:
    """A way to run a stream through a method, and what its results are averages over."""

    run: Callable
    average: str = "all"
    exact: tuple[int, ...] = SIZES
    """Numbers of ranks with which whole numbers stay whole: an anchor gets thirds at P = 3."""

    def over(self, method: str) -> str:
        return "all" if method == "dense" else self.average  # which all ranks send in full

    def tolerance(self, P: int) -> float:
        return 0 if P in self.exact else 1e-12


ADAPTERS = {
    "flat": Adapter(trajectory),
    "flat by senders": Adapter(partial(trajectory, average="senders"), "senders"),
    "local steps": Adapter(local_steps_trajectory, exact=(1, 2, 4)),
    "local steps by senders": Adapter(
        partial(local_steps_trajectory, average="senders", decay=0.5), "senders", exact=()
    ),
}


LONG_PATH = [("flat", P, 1) for P in SIZES] + [("flat", 3, 4)]
LONG_PATH += [("flat by senders", 2, 4), ("flat by senders", 3, 4)]
"""Where the laws also hold if no exchange of `oktopk` is a short one."""


def cases(several_only: bool = False):
    """Adapter, ranks, threads and method."""
    always = [("flat", *case) for case in ALWAYS]
    always += [(name, *case) for name in ADAPTERS if name != "flat" for case in FEW]
    slow = [("flat", *case) for case in SLOW]
    slow += [(name, *case) for name in ADAPTERS if name != "flat" for case in MORE]

    def is_slow(case: tuple, method: str) -> bool:
        if case == ("flat", 8, 1):
            return method != "oktopk"
        return case in slow or (case[0] != "flat" and method not in ("oktopk", "topka", "dense"))

    return [
        pytest.param(*case, method, marks=[pytest.mark.slow] if is_slow(case, method) else [])
        for case in [*always, *slow]
        for method in WAYS
        if not (several_only and case[2] == 1)
        if method in METHODS or case in LONG_PATH
    ]


over_worlds = pytest.mark.parametrize(("adapter", "P", "threads", "method"), cases())
over_threads = pytest.mark.parametrize(("adapter", "P", "threads", "method"), cases(True))


def long_enough(P, method, threads) -> int:
    """Steps: beyond new thresholds and bounds where a method has them."""
    is_oktopk = WAYS[method]["method"] == "oktopk"
    if threads != 1:  # only `oktopk` uses them
        return 40 if is_oktopk else 4
    return STEPS if P == 3 else 70 if is_oktopk else 12


@pytest.fixture(scope="module")
def long_run(world):
    """Many steps of whole numbers, threshold steps included; kept for the laws that look at it."""

    def run(adapter, P, method, threads):
        args = method, N, DENSITY, "whole", long_enough(P, method, threads)
        return world.run(P, ADAPTERS[adapter].run, *args, threads=threads)

    return cache(run)


@over_worlds
class TestInRealProcesses:
    def test_nothing_is_lost(self, long_run, adapter, P, method, threads):
        its = ADAPTERS[adapter]
        ranks = long_run(adapter, P, method, threads)
        assert_nothing_is_lost(ranks, its.tolerance(P))

    def test_all_ranks_agree_bit_for_bit(self, long_run, adapter, P, method, threads):
        assert_all_agree(long_run(adapter, P, method, threads))

    def test_k_means_k(self, long_run, adapter, P, method, threads):
        if method != "dense":
            assert_k_means_k(long_run(adapter, P, method, threads), method)

    def test_fp32_loses_nothing_but_rounding(self, world, adapter, P, method, threads):
        steps = STEPS if (adapter, method, P, threads) == ("flat", "oktopk", 3, 1) else 6
        args = method, N, DENSITY, "heavy", steps, torch.float32
        ranks = world.run(P, ADAPTERS[adapter].run, *args, threads=threads)
        assert_nothing_is_lost(ranks, tolerance=1e-6)
        assert_all_agree(ranks)

    def test_tiny_gradients(self, world, adapter, P, method, threads):
        its = ADAPTERS[adapter]
        for n, density in [(0, 0.5), (1, 0.01), (3, 0.4), (7, 1.0)]:
            ranks = world.run(P, its.run, method, n, density, "gaussian", 3, threads=threads)
            assert_nothing_is_lost(ranks, tolerance=1e-12)
            assert_all_agree(ranks)

    def test_odd_gradients(self, world, adapter, P, method, threads):
        its = ADAPTERS[adapter]
        for stream in ("zeros", "ties", "some_ranks_empty", "skewed", "cancelling"):
            ranks = world.run(P, its.run, method, 400, 0.05, stream, 4, threads=threads)
            assert_nothing_is_lost(ranks, tolerance=1e-12)
            assert_all_agree(ranks)

    def test_density_one_is_the_mean(self, world, adapter, P, method, threads):
        its = ADAPTERS[adapter]
        run = its.run if adapter.startswith("flat") else partial(its.run, every=1)
        for stream, steps in (("gaussian", 2), ("cancelling", 3), ("ties", 2)):
            ranks = world.run(P, run, method, 200, 1.0, stream, steps, threads=threads)
            times = P if its.over(method) == "all" else 1
            for step in range(steps):
                mean = sum(STREAMS[stream](200, rank, step) for rank in range(P)) / P
                torch.testing.assert_close(ranks[0][step].total / times, mean)
                assert ranks[0][step].residual.abs().max() <= 1e-15


@over_threads
def test_threads_change_no_bit(world, long_run, adapter, P, threads, method):
    several, one = long_run(adapter, P, method, threads), long_run(adapter, P, method, 1)
    for with_several, with_one in zip(several, one, strict=True):
        for mine, other in zip(with_several, with_one, strict=False):  # one may be longer
            assert mine.total.equal(other.total) and mine.residual.equal(other.residual)
            assert mine.stats.bytes_sent == other.stats.bytes_sent


@pytest.mark.parametrize(
    "method",
    [pytest.param(way, marks=[] if way == "oktopk" else pytest.mark.slow) for way in WAYS],
)
def test_laws_hold_for_two_million_elements(world, method):
    ranks = world.run(4, trajectory, method, 2_000_000, 0.01, "gaussian", 2, torch.float32)
    assert_nothing_is_lost(ranks, tolerance=1e-6)
    assert_all_agree(ranks)


@pytest.mark.parametrize("wire", ["int8", "int4", "int2", "sign"])
@pytest.mark.parametrize("method", ["oktopk", "topka", "topkdsa", "gtopk"])
@pytest.mark.parametrize("P", [2, 3, 4])
def test_laws_hold_with_low_bit_values(world, P, method, wire):
    """Beyond new thresholds where a method has them; sizes of messages travel on their own."""
    steps = 36 if method == "oktopk" else 6
    args = method, N, DENSITY, "heavy", steps, torch.float32, wire
    ranks = world.run(P, trajectory_with_wire, *args)
    assert_nothing_is_lost(ranks, tolerance=1e-6)
    assert_all_agree(ranks)
    assert_k_means_k(ranks, method)


def trajectory_with_wire(group, *args) -> list:
    *args, wire = args
    return trajectory(group, *args, wire=wire)
