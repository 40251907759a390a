# SPDX-License-Identifier: Apache-2.0
"""The plan of a step: phase, k, groups and quotas, decided before the first bucket."""

from __future__ import annotations

import pytest

from oktopk.exchange.layout import Bucket, grouped
from oktopk.exchange.step import QUOTA_STEPS, has_quotas, make_plan
from oktopk.settings import WIRE, Settings

ONE = grouped([Bucket(1000, dense=((0, 100),)), Bucket(500)], 10**9)
MANY = grouped([Bucket(1000, dense=((0, 100),)), Bucket(500), Bucket(500)], 1)


def plan(step: int, buckets=ONE, quotas=(), **more):
    return make_plan(Settings(density=0.1, **more), step, buckets, list(quotas))


def test_a_dense_step_exchanges_every_bucket_by_itself_and_unrounded():
    dense = plan(2, warmup_steps=3)
    assert (dense.phase, dense.k, dense.codec, dense.overshoot) == ("dense", 1500, "plain", 0.0)
    assert [list(group.buckets) for group in dense.groups] == [[0], [1]]
    assert not dense.whole_model


def test_the_method_dense_is_dense_in_every_step():
    assert plan(10**6, method="dense").phase == "dense"


def test_k_is_of_what_travels_sparse():
    assert plan(3, warmup_steps=3).k == 140  # of 1400
    assert plan(3, MANY, warmup_steps=3).k == 190


def test_density_and_overshoot_follow_the_schedule():
    settings = {"warmup_steps": 2, "schedule": ((3, 0.5),), "overshoot": 0.4}
    early, late = plan(4, **settings), plan(5, **settings)
    assert (early.density, late.density) == (0.5, 0.1)
    assert (early.overshoot, late.overshoot) == (0.2, pytest.approx(0.36))


def test_at_density_one_nothing_is_rounded():
    assert make_plan(Settings(density=1.0), 0, ONE, []).codec == "plain"
    assert plan(0).codec == WIRE


def test_one_group_has_all_of_k_and_no_quotas():
    assert not has_quotas(Settings(), ONE)
    one = plan(0)
    assert [(list(group.buckets), group.k) for group in one.groups] == [([0, 1], 140)]
    assert not one.whole_model


def test_early_and_exact_steps_set_quotas_with_the_whole_model():
    quotas = [90, 50, 50]
    for sparse_step in range(70):
        step = plan(3 + sparse_step, MANY, quotas, warmup_steps=3, exact_every=32)
        due = sparse_step in QUOTA_STEPS or sparse_step % 32 == 0
        assert step.whole_model == due, sparse_step
        assert [group.k for group in step.groups] == ([190] if due else quotas)


def test_quotas_that_do_not_add_up_to_k_are_set_anew():
    assert plan(5, MANY, [1, 2, 3]).whole_model
    assert plan(5, MANY, []).whole_model


def test_in_scope_bucket_every_bucket_has_its_own_density():
    step = plan(5, MANY, scope="bucket")
    assert [group.k for group in step.groups] == [90, 50, 50] and not step.whole_model
