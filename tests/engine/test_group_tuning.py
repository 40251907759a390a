# SPDX-License-Identifier: Apache-2.0
"""The choice of the size of groups: which steps are measured, and what is kept. No real clock."""

from __future__ import annotations

import pytest
import torch

from oktopk.comm.simulated import single_rank_comm
from oktopk.errors import StateError
from oktopk.exchange.engine import (
    SETTLING_STEPS,
    TRIAL_STEPS,
    Engine,
    GroupTuning,
    distinct_choices,
)
from oktopk.exchange.layout import Bucket, grouped
from oktopk.exchange.reducer import Reducer
from oktopk.settings import DEFAULT_GROUP_NUMEL, Settings
from streams import STREAMS

BUCKETS = [Bucket(numel) for numel in (100, 700, 400, 400, 400)]
ONE, TWO, FOUR = 2000, 1000, 500


def planned(start: int = 20) -> GroupTuning:
    tuning = GroupTuning()
    tuning.plan(start, BUCKETS)
    return tuning


def test_choices_cut_the_buckets_differently():
    assert distinct_choices(BUCKETS) == [ONE, TWO, FOUR]
    assert [len(grouped(BUCKETS, size).groups) for size in (ONE, TWO, FOUR)] == [1, 2, 3]
    assert distinct_choices([Bucket(100), Bucket(900)]) == [1000]  # the last bucket is nearly all
    assert distinct_choices([Bucket(7)]) == [7]
    assert distinct_choices([]) == [1]


def test_where_there_is_nothing_to_choose_the_choice_is_made():
    tuning = GroupTuning()
    tuning.plan(20, [Bucket(1000)])
    assert tuning.chosen == 1000 and not tuning.is_due(10**6)


def test_the_groups_of_a_step_follow_from_its_number():
    tuning = planned()
    sizes = [tuning.group_numel_at(step, 77) for step in range(20 + 3 * TRIAL_STEPS + 1)]
    each = [size for size in (ONE, TWO, FOUR) for _ in range(TRIAL_STEPS)]
    assert sizes == [77] * 20 + each + [FOUR]
    assert [tuning.is_due(20 + 3 * TRIAL_STEPS + i) for i in (-1, 0, 1)] == [False, True, True]


def test_the_first_steps_of_a_trial_are_not_measured():
    tuning = planned()
    for step in range(60):
        tuning.record(step, 1e-6 * step)
    for number, times in enumerate(tuning.times):
        first = 20 + number * TRIAL_STEPS
        assert times == list(range(first + SETTLING_STEPS, first + TRIAL_STEPS))


def test_the_fastest_is_kept():
    tuning = planned()
    tuning.choose([300, 200, 250])
    assert tuning.chosen == TWO and tuning.group_numel_at(0, 77) == TWO
    assert tuning.trial(20) is None and not tuning.is_due(10**6)


@pytest.mark.parametrize(
    ("totals", "chosen"),
    [([5, 5, 5], ONE), ([-3, 9, 8], FOUR), ([-3, -3, -3], ONE), ([9, -3, 10], ONE)],
)
def test_ties_go_to_the_largest_groups_and_trials_without_times_are_not_kept(totals, chosen):
    tuning = planned()
    tuning.choose(totals)
    assert tuning.chosen == chosen


def test_medians_are_of_the_measured_steps():
    tuning = planned()
    for number, times in enumerate([[0.001, 0.009, 0.002], [], [0.004]]):
        for i, seconds in enumerate(times):
            tuning.record(20 + number * TRIAL_STEPS + SETTLING_STEPS + i, seconds)
    assert tuning.medians() == [2000, -1, 4000]


def run(engine: Engine, steps: range) -> list[torch.Tensor]:
    numels, done = engine.buckets.numels, []
    for step in steps:
        grad = STREAMS["heavy"](sum(numels), 0, step).float()
        current = engine.begin(grad)
        for bucket, part in enumerate(grad.split(numels)):
            current.add_bucket(bucket, part)
        engine.finish(current)
        done.append(grad)
    return done


def automatic() -> Engine:
    return Engine(Settings(density=0.1, group_numel="auto"), single_rank_comm(), BUCKETS)


def test_an_engine_starts_with_the_constant_and_keeps_its_residual_when_regrouped():
    engine = automatic()
    assert engine.group_numel == DEFAULT_GROUP_NUMEL == Settings().group_numel
    run(engine, range(3))
    residual, states = engine.residual, engine.group_states
    engine.regroup(ONE)  # the same groups: nothing begins anew
    assert engine.group_states is states
    engine.regroup(TWO)
    assert len(engine.group_states) == 2 and engine.quotas == [] and engine.residual is residual
    run(engine, range(3, 4))
    assert sum(engine.quotas) == 200  # the first step afterwards sets quotas
    engine.regroup(ONE)
    assert engine.quotas == [] and len(engine.group_states) == 1


@pytest.mark.parametrize("stop", [TRIAL_STEPS - 1, TRIAL_STEPS, TRIAL_STEPS + 2, 3 * TRIAL_STEPS])
def test_a_state_has_the_trials_and_the_groups(stop):
    """Resumed within a trial, between two, and before the choice: the same bits."""

    def tuned(engine, steps):
        done = []
        for step in steps:
            if engine.tuning.is_due(step):
                engine.tuning.choose([3, 1, 2])
            engine.regroup(engine.tuning.group_numel_at(step, engine.group_numel))
            done += run(engine, range(step, step + 1))
            engine.tuning.record(step, 0.001)
        return done

    whole, first, second = automatic(), automatic(), automatic()
    for engine in (whole, first):
        engine.tuning.plan(0, BUCKETS)
    expected = tuned(whole, range(30))
    tuned(first, range(stop))
    second.load(first.save())
    second.residual = first.residual.clone()
    assert second.tuning.times == first.tuning.times
    for mine, other in zip(tuned(second, range(stop, 30)), expected[stop:], strict=True):
        assert mine.equal(other)
    assert second.tuning.chosen == second.group_numel == TWO


def test_a_fixed_size_ignores_a_choice_in_the_state():
    engine = automatic()
    engine.tuning.plan(0, BUCKETS)
    engine.tuning.choose([3, 1, 2])
    fixed = Engine(Settings(density=0.1), single_rank_comm(), BUCKETS)
    fixed.load(engine.save())
    assert fixed.tuning is None and fixed.group_numel == DEFAULT_GROUP_NUMEL


def test_a_state_with_trials_that_do_not_fit_is_refused():
    reducer = Reducer(10, density=0.5)
    state = reducer.state_dict()
    state["engine"]["tuning"] = {"start": 0, "choices": [5], "times": [], "chosen": None}
    with pytest.raises(StateError, match="times of 0 groupings"):
        reducer.load_state_dict(state)


@pytest.mark.parametrize("value", ["automatic", 0, -1, 1.5])
def test_a_size_of_groups_is_a_number_or_auto(value):
    with pytest.raises((TypeError, ValueError), match="group_numel"):
        Settings(group_numel=value)
