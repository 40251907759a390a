# SPDX-License-Identifier: Apache-2.0
"""The laws over every method on simulated ranks: many of them, and every odd shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laws import (
    WAYS,
    assert_all_agree,
    assert_bill_is_bounded,
    assert_k_means_k,
    assert_nothing_is_lost,
    simulated,
)
from oktopk import METHODS, Reducer, simulate
from oktopk.wire import CODECS
from streams import STREAMS

over_methods = pytest.mark.parametrize("method", WAYS)


@over_methods
@pytest.mark.parametrize(
    ("P", "steps"),
    [(16, 34), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(64, 2), (256, 1)])],
)
def test_laws_hold_for_many_simulated_ranks(P, steps, method):
    if not method.startswith("oktopk"):  # the others do the same at every step
        steps = min(steps, 6)
    ranks = simulated(P, method, 1000, 0.05, "whole", steps)
    assert_nothing_is_lost(ranks, tolerance=0)
    assert_all_agree(ranks)
    if method != "dense":
        assert_k_means_k(ranks, method)
    if method.startswith("oktopk"):
        assert_bill_is_bounded(ranks)


@over_methods
@settings(max_examples=25, deadline=None)
@given(
    P=st.integers(1, 6),
    n=st.integers(0, 80),
    density=st.floats(0.001, 1.0),
    stream=st.sampled_from(sorted(STREAMS)),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    average=st.sampled_from(["all", "senders"]),
    decay=st.sampled_from([1.0, 0.5, 0.0]),
    overshoot=st.sampled_from([0.0, 0.5]),
)
def test_laws_hold_whatever_the_shape(
    method, P, n, density, stream, dtype, average, decay, overshoot
):
    more = {"exact_every": 3, "bounds_every": 2, "average": average, "decay": decay}
    more["overshoot"] = overshoot
    ranks = simulated(P, method, n, density, stream, 5, dtype, **more)
    assert_nothing_is_lost(ranks, tolerance=1e-12 if dtype == torch.float64 else 1e-5)
    assert_all_agree(ranks)
    for done in ranks:
        for step in done:
            assert step.stats.local <= step.stats.k
    if method.startswith("oktopk"):
        assert_bill_is_bounded(ranks, dtype.itemsize)


@over_methods
@pytest.mark.parametrize("P", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_keep_fp32_residuals(method, P, dtype):
    ranks = simulated(P, method, 600, 0.1, "gaussian", 10, dtype)
    assert_all_agree(ranks)
    # the delivered average is rounded to 16 bits; what is owed is not
    assert_nothing_is_lost(ranks, tolerance=torch.finfo(dtype).eps)


@over_methods
@pytest.mark.parametrize("P", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wire", CODECS)
def test_rounded_averages_over_senders_lose_nothing(method, P, wire):
    """What division and rounding take off a quotient, times its senders, stays in a residual; with
    an overshoot as much more of it."""
    how = {"wire": wire, "average": "senders", "decay": 0.9, "overshoot": 0.5}
    ranks = simulated(P, method, 1000, 0.05, "heavy", 12, torch.float32, **how)
    assert_all_agree(ranks)
    assert_nothing_is_lost(ranks, tolerance=1e-5)


def reduced_signs(comm, method, n, k):
    """What arrives of one step in which all magnitudes are equal, as with the moves of Lion."""
    reducer = Reducer(n, method=method, density=k / n, comm=comm, average="senders")
    signs = torch.randn(n, generator=torch.Generator().manual_seed(comm.rank)).sign()
    stats = reducer.reduce_(signs)
    return stats.local, stats.result, signs


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.name != "dense"])
@pytest.mark.parametrize("P", [1, 2, 3, 7])
@pytest.mark.parametrize(("n", "k"), [(400, 20), (401, 60), (400, 200), (7, 1), (5, 5)])
def test_ranks_with_equal_magnitudes_select_different_entries(method, P, n, k):
    """Where all that was selected is delivered: as many distinct entries as there can be."""
    ranks = simulate(P, lambda comm: reduced_signs(comm, method, n, k))
    arrives = k if METHODS[method].keeps_k else min(n, P * k)
    for num_local, num_result, average in ranks:
        assert num_local == k and num_result == arrives
        assert average.equal(ranks[0][2])


@pytest.mark.parametrize("method", [way for way in WAYS if way != "dense"])
@pytest.mark.parametrize("P", [1, 2, 3, 5])
@pytest.mark.parametrize("average", ["all", "senders"])
def test_what_travels_dense_is_the_mean_of_all_ranks(method, P, average):
    """No rank holds any of it back, and it is divided by the number of ranks either way."""
    dense, how = ((3, 50), (600, 607)), {"average": average, "wire": "bf16"}
    ranks = simulated(P, method, 700, 0.1, "heavy", 6, torch.float32, dense, **how)
    assert_all_agree(ranks)
    assert_nothing_is_lost(ranks, tolerance=1e-5)
    for done in ranks:
        for start, end in dense:
            assert not any(step.residual[start:end].any() for step in done)
