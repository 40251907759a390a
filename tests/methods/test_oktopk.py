# SPDX-License-Identifier: Apache-2.0
"""Ok-Topk as the paper has it: its bill, its thresholds, its regions, its balance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laws import (
    Step,
    assert_all_agree,
    assert_bill_is_bounded,
    assert_k_means_k,
    assert_nothing_is_lost,
    simulated,
)
from oktopk import simulate
from oktopk.comm.simulated import single_rank_comm
from oktopk.exchange.engine import Engine
from oktopk.exchange.layout import Bucket
from oktopk.methods import balance
from oktopk.methods.balance import kth_over_ranks
from oktopk.methods.ok_topk import balanced_bounds
from oktopk.settings import Settings
from oktopk.sparse import Sparse
from streams import STREAMS

LONG = "oktopk, long path"


@pytest.mark.parametrize(
    ("stream", "steps"),
    [
        ("drifting", 200),
        *(
            pytest.param(stream, 500, marks=pytest.mark.slow)
            for stream in ("heavy", "drifting", "gaussian", "laplace")
        ),
    ],
)
def test_counts_stay_near_k_for_hundreds_of_steps(stream, steps):
    ranks = simulated(4, LONG, 5000, 0.02, stream, steps, torch.float32)
    assert_k_means_k(ranks, "oktopk")
    assert_bill_is_bounded(ranks, value_bytes=4)
    assert_all_agree(ranks)


@pytest.mark.parametrize("stream", ["jumping", "zeros", "ties", "skewed", "some_ranks_empty"])
@pytest.mark.parametrize("P", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_bill_and_cap_hold_whatever_the_gradients_do(P, stream):
    ranks = simulated(P, LONG, 3000, 0.02, stream, 34)
    assert_bill_is_bounded(ranks)
    assert_nothing_is_lost(ranks, tolerance=1e-12)
    for done in ranks:
        for step in done:
            assert step.stats.local <= step.stats.k
            assert step.stats.result <= 1.1 * step.stats.k


def test_a_jump_of_scale_is_met_in_the_same_step():
    """From zero, up and down by 1000: no step keeps too few or too many, not even the first."""
    for done in simulated(4, LONG, 3000, 0.02, "jumping", 60):
        for step in done:
            if step.acc.count_nonzero() > 100:
                assert 0.9 * 60 <= step.stats.local <= 60, step.stats
                assert 0.9 * 60 <= step.stats.result <= 1.1 * 60, step.stats


@pytest.mark.parametrize("most", [32, pytest.param(256, marks=pytest.mark.slow)])
def test_words_do_not_grow_with_the_number_of_ranks(most):
    """The mean over ranks is 4k(P-1)/P words: the same at 8 and at 256 but for (P-1)/P."""
    k, words = 800, {}
    for P, steps in ((8, 12), (16, 6), (most, 2)):
        ranks = simulated(P, LONG, 40_000, 0.02, "heavy", steps, torch.float32, wire="plain")
        assert_bill_is_bounded(ranks, value_bytes=4)
        payload = [s.stats.bytes_sent - s.stats.bytes_header for done in ranks for s in done]
        words[P] = sum(payload) / len(payload) / 4 / ((P - 1) / P)
        assert max(payload) / 4 <= 6 * k * (P - 1) / P
    assert max(words.values()) <= 1.1 * min(words.values()), words


def test_ranks_in_each_others_regions_still_get_a_full_result():
    """At 2 to 5 ranks the mean of their cuts may be the worst there is; one owner mends it."""
    for P in (2, 3, 4, 5):
        ranks = simulated(P, LONG, 10_000, 0.02, "apart", 70)
        assert_bill_is_bounded(ranks)
        assert_nothing_is_lost(ranks, tolerance=1e-12)
        short = [s.stats.step for s in ranks[0] if s.stats.result < 0.9 * s.stats.k]
        assert len(short) <= 1, (P, short)


@pytest.mark.parametrize("every", [1, 7])
def test_bounds_and_thresholds_are_renewed_when_they_are_due(every):
    more = {"exact_every": every, "bounds_every": every}
    done = simulated(3, LONG, 2000, 0.05, "gaussian", 29, **more)[0]
    for step in done:
        due = step.stats.step % every == 0
        assert ("threshold" in step.stats.stages) >= due
        assert ("bounds" in step.stats.stages) >= due
    if every > 1:
        assert sum("bounds" in step.stats.stages for step in done) < 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_global_threshold_is_the_kth_magnitude_of_all(P, dtype):
    values = [torch.randn(50 * rank, dtype=dtype).round(decimals=1) for rank in range(P + 1)][1:]
    everything = torch.cat(values).abs()
    everything = everything.sort(descending=True).values
    for k in (1, 2, 17, len(everything)):
        found = simulate(P, lambda comm, k=k: kth_over_ranks(values[comm.rank], k, comm))
        assert found == [everything[k - 1].item()] * P
    too_many = len(everything) + 1
    assert simulate(P, lambda c: kth_over_ranks(values[c.rank], too_many, c)) == [0.0] * P


def test_bounds_even_out_a_skewed_selection():
    """All entries in the last tenth: every region gets its share of them all the same."""
    indices = torch.arange(900, 1000, dtype=torch.int32)
    local = Sparse(indices, torch.ones(100), 1000)
    for bounds in simulate(4, lambda comm: balanced_bounds(local, comm)):
        assert bounds == [0, 925, 950, 975, 1000]


def test_bounds_do_not_overflow():
    """Sums of positions near 2**31 need int64."""
    n = 2**31 - 1
    local = Sparse(torch.tensor([n - 2, n - 1], dtype=torch.int32), torch.ones(2), n)
    for bounds in simulate(64, lambda comm: balanced_bounds(local, comm)):
        assert bounds == sorted(bounds) and bounds[-2] == n - 1


counts_of_ranks = st.lists(st.integers(0, 60), min_size=1, max_size=9)


@given(counts_of_ranks)
@settings(max_examples=60, deadline=None)
def test_balance_changes_who_sends_but_not_what_arrives(counts):
    width = 2 * max(counts) + 1
    bounds = [rank * width for rank in range(len(counts) + 1)]
    indices = [bounds[rank] + 2 * torch.arange(num).int() for rank, num in enumerate(counts)]

    def both(comm):
        share = torch.tensor([float(comm.rank), 7.0])
        where = indices[comm.rank]
        mine = Sparse(where, where.float().sin(), bounds[-1])
        return [
            balance.gather(mine, counts, bounds, share, comm, form, balanced=b)
            for form in ("plain", "bf16")
            for b in (False, True)
        ]

    riders = [value for rank in range(len(counts)) for value in (float(rank), 7.0)]
    for rank, done in enumerate(simulate(len(counts), both)):
        everything = torch.cat(indices)
        for sums in done:
            assert torch.equal(sums.result.indices, everything)
            assert sums.dense_part.tolist() == riders
        assert torch.equal(done[0].result.values, everything.float().sin())
        assert torch.equal(done[1].result.values, done[0].result.values)
        assert torch.equal(done[3].result.values, done[2].result.values)
        sent = [balance.entries_sent(counts, balanced=b)[rank] for b in (False, True)]
        riding = 2 * (len(counts) - 1)
        assert [sums.num_sent - riding for sums in done] == sent * 2


@given(counts_of_ranks)
def test_only_the_surplus_moves_and_shares_end_even(counts):
    after = list(counts)
    for source, target, num in balance.surplus_moves(counts):
        assert num > 0
        after[source] -= num
        after[target] += num
    assert after == balance.even_shares(sum(counts), len(counts))
    moved = sum(num for _, _, num in balance.surplus_moves(counts))
    assert moved == sum(max(c - a, 0) for c, a in zip(counts, after, strict=True))


def test_balance_follows_the_rule_of_four():
    k = 1000
    nothing_sent = [0] * 8
    assert not balance.must_balance([120] * 8, nothing_sent, k)
    assert balance.must_balance([501, 71, 71, 71, 71, 71, 72, 72], nothing_sent, k)
    # direct sends of twice the mean are over 6k(P-1)/P words together with split-and-reduce
    uneven = [260, 106, 106, 106, 106, 106, 105, 105]
    assert balance.must_balance(uneven, [k * 7 // 8] * 8, k)
    assert balance.within_bound(uneven, [k * 7 // 8] * 8, k, balanced=True)


@given(st.integers(2, 40), st.integers(1, 500), st.data())
def test_what_is_affordable_stays_within_the_bound(size, k, data):
    num_sent = data.draw(st.lists(st.integers(0, k), min_size=size, max_size=size))
    total = balance.affordable(num_sent, k)
    holder = data.draw(st.integers(0, size - 1))
    counts = [total if rank == holder else 0 for rank in range(size)]
    assert 0 < total <= k
    assert balance.within_bound(counts, num_sent, k, balanced=True)


def test_balance_happens_when_one_rank_holds_the_result():
    ranks = simulated(8, LONG, 4000, 0.02, "skewed", 60)
    stages = {stage for done in ranks for step in done for stage in step.stats.stages}
    assert "balance" in stages
    assert max(step.stats.imbalance for step in ranks[0]) > 4
    assert_nothing_is_lost(ranks, tolerance=1e-12)


def test_a_threshold_step_costs_no_spike():
    """The reference gathers every non-zero on threshold steps; here they cost a few kilobytes."""
    done = simulated(8, LONG, 60_000, 0.02, "heavy", 34, torch.float32)[0]
    exact, reuse = done[32].stats, done[31].stats
    assert "threshold" in exact.stages and "threshold" not in reuse.stages
    assert exact.bytes_sent - exact.bytes_header <= 1.2 * (reuse.bytes_sent - reuse.bytes_header)
    assert exact.bytes_header <= 10_000


@pytest.mark.parametrize("short_bytes", [0, 700, 2**16])
@pytest.mark.parametrize("group", [1, 2500, 10**9])
def test_groups_of_buckets_lose_nothing_and_keep_k(group, short_bytes):
    """Several groups have quotas; one has the whole model; both count k over the model.

    With 700 bytes, groups go the short path and the steps that set quotas the long one.
    """
    numels, k = [1000, 1500, 500, 2000], 100
    asked = Settings(density=k / 5000, group_numel=group, short_bytes=short_bytes)

    def main(comm):
        engine = Engine(asked, comm, [Bucket(numel) for numel in numels])
        assert len(engine.buckets.groups) == {1: 4, 2500: 2, 10**9: 1}[group]
        done = []
        for step in range(40):
            grad = STREAMS["heavy"](5000, comm.rank, step).float()
            acc = grad + (0 if engine.residual is None else engine.residual)
            current = engine.begin(grad)
            for bucket, part in enumerate(grad.split(numels)):
                current.add_bucket(bucket, part)
            stats = engine.finish(current)
            total, residual = grad.double() * 3, engine.residual.double()
            done.append(Step(acc.double(), total, residual, stats, asked, None))
        return done

    ranks = simulate(3, main)
    assert_nothing_is_lost(ranks, tolerance=1e-4)
    assert_all_agree(ranks)
    assert_k_means_k(ranks, "oktopk")


def test_a_state_of_other_groups_gives_its_counters():
    buckets = [Bucket(1000), Bucket(1000)]
    many = Engine(Settings(density=0.1, group_numel=1), single_rank_comm(), buckets)
    for step in range(3):
        current = many.begin(torch.zeros(1))
        for bucket in range(2):
            current.add_bucket(bucket, STREAMS["heavy"](1000, bucket, step).float())
        many.finish(current)
    one = Engine(Settings(density=0.1), single_rank_comm(), buckets)
    one.load(many.save())
    assert one.step == 3 and len(one.group_states) == 1 and one.quotas == []
