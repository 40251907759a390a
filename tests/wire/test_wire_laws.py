# SPDX-License-Identifier: Apache-2.0
"""Every codec in an exchange of simulated ranks: nothing is lost, all agree, bytes are bounded."""

from __future__ import annotations

import pytest
import torch

import oktopk
from laws import (
    WAYS,
    assert_all_agree,
    assert_bill_is_bounded,
    assert_k_means_k,
    assert_nothing_is_lost,
    simulated,
)
from oktopk.exchange.step import apply_sparse_
from oktopk.methods.base import MethodState, Work
from oktopk.wire import CODECS
from streams import STREAMS
from wire_cases import BITS

NOT_CODED = ("dense", "gaussiank")  # the second exchanges as topka does

over_methods = pytest.mark.parametrize("method", [way for way in WAYS if way not in NOT_CODED])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("P", [1, 2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_nothing_is_lost_and_all_agree(P, method, name):
    ranks = simulated(P, method, 3000, 0.02, "heavy", 36, torch.float32, wire=name)
    assert_nothing_is_lost(ranks, tolerance=1e-4)
    assert_all_agree(ranks)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("method", ["oktopk", "oktopk, long path"])
def test_fewer_bits_send_fewer_bytes(method, name):
    (step, *_), *_ = simulated(4, method, 100_000, 0.02, "heavy", 1, torch.float32, wire=name)
    bits = 8 * (step.stats.bytes_sent - step.stats.bytes_header) / step.stats.entries_sent
    assert bits <= BITS[name] * 1.02


def one_exchange(comm, method, name):
    """acc, result and the residual after one exchange of whole numbers."""
    acc = (STREAMS["whole"](3000, comm.rank, 0) / 100).trunc().float()
    row = oktopk.METHODS[WAYS[method]["method"]]
    state = MethodState(**{key: value for key, value in WAYS[method].items() if key != "method"})
    local = row.select(acc, 60, state, None)
    sums = row.exchange(local, acc[:0], 60, state, name, comm)
    residual = acc.clone()
    apply_sparse_(torch.empty_like(acc), residual, sums, comm.size)
    return acc.double(), sums.result, residual.double()


@pytest.mark.parametrize("name", ["plain", "fp32", "bf16", "int4", "int2", "sign"])
@over_methods
@pytest.mark.parametrize("P", [2, 3, 4])
def test_nothing_is_lost_to_the_last_bit(P, method, name):
    """Every addition of these numbers is exact, so that nothing but the codec could lose a bit."""
    ranks = oktopk.simulate(P, lambda comm: one_exchange(comm, method, name))
    (acc, (result, *others), residual) = zip(*ranks, strict=True)
    assert result.num >= 54
    assert sum(acc).equal(result.to_dense().double() + sum(residual))
    for other in others:
        assert other.indices.equal(result.indices) and other.values.equal(result.values)


@pytest.mark.parametrize("name", ["int4", "int2", "sign"])
@over_methods
@pytest.mark.parametrize("stream", ["zeros", "ties", "some_ranks_empty", "skewed", "cancelling"])
def test_odd_gradients(name, method, stream):
    for n, density in [(400, 0.05), (3, 0.4), (1, 0.01), (0, 0.5)]:
        ranks = simulated(3, method, n, density, stream, 4, torch.float32, wire=name)
        assert_nothing_is_lost(ranks, tolerance=1e-6)
        assert_all_agree(ranks)


@pytest.mark.parametrize("name", ["int4", "int2", "sign"])
@over_methods
@pytest.mark.parametrize("P", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_k_means_k_and_the_bill_is_bounded(P, method, name):
    ranks = simulated(P, method, 3000, 0.02, "drifting", 70, torch.float32, wire=name)
    assert_k_means_k(ranks, method)
    if method.startswith("oktopk"):
        assert_bill_is_bounded(ranks, value_bytes=4, is_sized_by_count=False)


def rounds_of(comm, method, name) -> int:
    """How often a rank exchanges messages or headers in a step."""
    rounds = 0

    def counted(collective):
        def call(*args):
            nonlocal rounds
            rounds += 1
            collective(*args)

        return call

    for each in ("exchange", "all_to_all"):
        setattr(comm.transport, each, counted(getattr(comm.transport, each)))
    one_exchange(comm, method, name)
    return rounds


@pytest.mark.parametrize("name", CODECS)
@over_methods
def test_the_cost_model_has_the_round_in_which_sizes_are_told(method, name):
    plain, told = (
        oktopk.simulate(3, lambda comm, name=name: rounds_of(comm, method, name))
        for name in ("plain", name)
    )
    cost = oktopk.METHODS[WAYS[method]["method"]].cost
    limit = {key: value for key, value in WAYS[method].items() if key != "method"}
    more = cost(Work(3000, 60, 3, wire=name, **limit)).rounds
    more -= cost(Work(3000, 60, 3, **limit)).rounds
    assert [rounds + more for rounds in plain] == told


def test_an_unknown_codec_is_refused():
    with pytest.raises(ValueError, match="wire must be one of"):
        oktopk.Reducer(10, wire="zip")
