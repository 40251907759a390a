# SPDX-License-Identifier: Apache-2.0
"""The short path of `oktopk`: when it is taken, what it costs, and what it keeps."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laws import simulated
from oktopk import METHODS, simulate
from oktopk.methods.balance import max_entries
from oktopk.methods.base import SHORT_BYTES, MethodState, Work
from oktopk.methods.ok_topk import is_short
from oktopk.methods.selection import largest_positions
from oktopk.settings import Settings
from oktopk.sparse import Sparse
from oktopk.wire import CODECS, EntryRange, max_words, most_words
from streams import STREAMS

FLOAT = torch.float32


def exchanged(size, k, numel=3000, wire="bf16", average="all", num_dense=0, limit=SHORT_BYTES):
    """One exchange on every rank: what it was of, what it gave, and its state afterwards."""

    def main(comm):
        state, oktopk = MethodState(short_bytes=limit), METHODS["oktopk"]
        acc = STREAMS["heavy"](numel, comm.rank, 0).float()
        local = oktopk.select(acc, k, state, None)
        dense_part = torch.full((num_dense,), float(comm.rank + 1))
        sums = oktopk.exchange(local, dense_part, k, state, wire, comm, average)
        return sums, state, comm.ledger

    return simulate(size, main)


@pytest.mark.parametrize("wire", CODECS)
@pytest.mark.parametrize("average", ["all", "senders"])
@pytest.mark.parametrize("P", [2, 3])
def test_the_result_is_the_top_k_of_all_selections(P, average, wire):
    ranks = exchanged(P, 60, wire=wire, average=average)
    total = sum(sums.sent.to_dense() for sums, *_ in ranks)  # in rank order
    senders = sum((sums.sent.to_dense() != 0).float() for sums, *_ in ranks)
    order = total.abs().sort(descending=True, stable=True).indices[:60].sort().values
    expected = total if average == "all" else total / senders
    for sums, *_ in ranks:
        assert sums.result.indices.equal(order.int())
        assert sums.result.values.equal(expected[order])
        assert sums.corrections == ()


@pytest.mark.parametrize("num_dense", [0, 7])
@pytest.mark.parametrize("wire", CODECS)
@pytest.mark.parametrize("P", [1, 2, 3])
def test_it_takes_two_rounds_and_the_bytes_of_the_formula(P, wire, num_dense):
    told = 1 if CODECS[wire].indices.is_sized_by_count else 2
    for sums, state, ledger in exchanged(P, 60, wire=wire, num_dense=num_dense):
        total = ledger.total()
        assert total.messages_sent == 2 * (P - 1)
        assert total.header_sent == 4 * told * (P - 1)
        entries = EntryRange(sums.sent.num, 0, 3000)
        most = 4 * (P - 1) * (max_words(entries, wire, FLOAT) + num_dense)
        assert total.payload_sent == most or (told == 2 and total.payload_sent < most)
        assert sums.num_sent == (sums.sent.num + num_dense) * (P - 1)
        assert sums.dense_part.tolist() == [P * (P + 1) / 2] * num_dense
        assert state.step == 1 and state.bounds is None and state.result is None


def test_few_ranks_with_small_messages_go_the_short_path():
    """The bound on words holds for bf16 up to 8 ranks, for plain up to 3."""
    sizes = {wire: [P for P in range(1, 65) if taken(P, wire)] for wire in ("bf16", "plain")}
    assert sizes == {"bf16": list(range(1, 9)), "plain": [1, 2, 3]}


def taken(size, wire, k=1000, numel=50_000, num_dense=0, limit=SHORT_BYTES) -> bool:
    return is_short(Work(numel, k, size, wire, FLOAT, num_dense, limit))


def test_what_travels_dense_counts_as_bytes():
    assert taken(2, "bf16") and not taken(2, "bf16", num_dense=SHORT_BYTES // 4)
    assert taken(2, "bf16", limit=4 * 1000 + 2960, num_dense=1000)
    assert not taken(2, "bf16", limit=4 * 1000 + 2900, num_dense=1000)
    assert not taken(2, "bf16", limit=0)
    assert taken(1, "bf16", limit=1) and not taken(1, "bf16", limit=0)  # nothing is sent


@given(
    st.integers(1, 40), st.integers(0, 300), st.integers(0, 5000), st.sampled_from(sorted(CODECS))
)
@settings(max_examples=200, deadline=None)
def test_the_bound_on_words_holds_on_the_short_path(size, k, numel, wire):
    """Also for a rank that selects fewer entries than it may."""
    k = min(k, numel)
    if is_short(Work(numel, k, size, wire, short_bytes=2**40)):
        for count in range(k + 1):
            words = max_words(EntryRange(count, 0, numel), wire, FLOAT)
            assert words * (size - 1) <= 2 * max_entries(k, size)


@given(st.integers(0, 400), st.integers(1, 2**20), st.sampled_from(sorted(CODECS)))
@settings(max_examples=200, deadline=None)
def test_fewer_entries_take_no_more_words_than_the_most(count, width, wire):
    count = min(count, width)
    most = most_words(EntryRange(count, 0, width), wire, FLOAT)
    for fewer in range(count + 1):
        assert max_words(EntryRange(fewer, 0, width), wire, FLOAT) <= most


def test_ranks_with_different_counts_go_the_same_way():
    """One rank has nothing to send, another less than k: the path follows from k alone."""
    for done in simulated(3, "oktopk", 3000, 0.02, "some_ranks_empty", 8, torch.float32):
        for step in done:
            assert set(step.stats.stages) <= {"counts", "gather"}


def test_a_schedule_passes_from_the_long_path_to_the_short_one_and_back():
    """k falls below the limit and rises again; thresholds and bounds are where they were."""
    schedule = ((4, 0.2), (4, 0.01), (4, 0.2))
    how = {"schedule": schedule, "short_bytes": 2000}
    for done in simulated(3, "oktopk", 5000, 0.01, "drifting", 14, torch.float32, **how):
        short = ["split" not in step.stats.stages for step in done]
        assert short == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 2
        assert all(0.9 * s.stats.k <= s.stats.result <= 1.1 * s.stats.k for s in done[3:])


def test_the_cost_model_takes_the_same_path():
    work = {"numel": 50_000, "kept": 1000}
    assert [is_short(Work(size=P, **work)) for P in (1, 2, 8, 9)] == [True, True, True, False]
    oktopk, topka = METHODS["oktopk"].cost, METHODS["topka"].cost
    assert oktopk(Work(size=4, **work)) == topka(Work(size=4, **work))
    assert oktopk(Work(size=4, short_bytes=0, **work)).rounds == 4
    large = Work(size=4, numel=10**7, kept=200_000)
    assert oktopk(large).rounds == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_are_found_whatever_the_values(dtype):
    values = torch.tensor([0.0, -3.0, 1.0, 3.0, 0.0, -1.0, 2.0], dtype=dtype)
    expected = {0: [], 1: [1], 2: [1, 3], 3: [1, 3, 6], 4: [1, 2, 3, 6], 6: [0, 1, 2, 3, 5, 6]}
    for k, where in expected.items():
        assert largest_positions(values, k).tolist() == where
    values[4] = torch.inf
    assert largest_positions(values, 2).tolist() == [1, 4]
    values[2] = torch.nan
    assert largest_positions(values, 1).tolist() == [2]
    values[5] = values[6] = torch.nan
    assert largest_positions(values, 2).tolist() == [2, 5]


def test_a_sum_that_overflows_is_seen_by_all_ranks():
    huge = torch.finfo(torch.float32).max

    def main(comm):
        local = Sparse(torch.tensor([3], dtype=torch.int32), torch.tensor([huge]), 10)
        nothing, state = torch.empty(0), MethodState()
        sums = METHODS["oktopk"].exchange(local, nothing, 1, state, "plain", comm)
        return sums.result.values.item()

    assert simulate(2, main) == [torch.inf] * 2


def test_the_limit_is_a_setting():
    assert Settings().short_bytes == SHORT_BYTES == Work(1, 1, 1).short_bytes
    with pytest.raises(ValueError, match="short_bytes"):
        Settings(short_bytes=-1)


@pytest.mark.parametrize("method", METHODS)
def test_an_exchange_of_nothing_has_a_cost(method):
    """Rank 0 announces it, also for a model whose parameters all travel dense."""
    for numel, wire in product((0, 5), CODECS):
        cost = METHODS[method].cost(Work(numel, 0, 4, wire, torch.float32, 3, 4096))
        assert 0 <= cost.sent < float("inf") and 0 <= cost.bytes < float("inf")
