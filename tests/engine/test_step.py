# SPDX-License-Identifier: Apache-2.0
"""One step of the engine: what it changes when it is applied, skipped or dropped."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from msgspec.structs import replace

from oktopk.comm.simulated import single_rank_comm
from oktopk.exchange.engine import Engine
from oktopk.exchange.layout import Bucket
from oktopk.exchange.step import apply_dense_, apply_sparse_
from oktopk.methods.base import DenseSum, SparseSum
from oktopk.settings import Settings
from oktopk.sparse import Sparse


def engine(**more) -> Engine:
    return Engine(
        Settings(density=0.1, **more), single_rank_comm(), [Bucket(40, dense=((0, 3),)), Bucket(60)]
    )


def grads(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(40, generator=g), torch.randn(60, generator=g)]


def take(one: Engine, seed: int, bad: float | None = None):
    parts = grads(seed)
    if bad is not None:
        parts[1][7] = bad
    step = one.begin(parts[0])
    for bucket, part in enumerate(parts):
        step.add_bucket(bucket, part)
    return one.finish(step), parts


def frozen(one: Engine) -> tuple:
    return one.residual.clone(), replace(one.save(), step=0, skipped=0)


@pytest.mark.parametrize("group_numel", [1, 10**6])
def test_a_step_that_is_dropped_has_changed_nothing(group_numel):
    one = engine(group_numel=group_numel)
    for seed in range(5):
        take(one, seed)
    residual, state = frozen(one)
    step = one.begin(torch.zeros(1))
    step.add_bucket(0, grads(9)[0])
    step.discard()
    assert torch.equal(one.residual, residual) and frozen(one)[1] == state and one.step == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("group_numel", [1, 10**6])
def test_a_skipped_step_counts_and_changes_nothing_else(bad, group_numel):
    one = engine(group_numel=group_numel)
    for seed in range(5):
        take(one, seed)
    residual, state = frozen(one)
    stats, parts = take(one, 9, bad)
    assert stats.skipped and stats.result == 0 and (one.step, one.skipped) == (6, 1)
    assert all(not part.any() for part in parts)
    assert torch.equal(one.residual, residual) and frozen(one)[1] == state


def test_what_is_applied_and_the_residual_add_up():
    one = engine(wire="plain")
    owed = torch.zeros(100)
    for seed in range(6):
        before = torch.cat(grads(seed)) + owed
        _, parts = take(one, seed)
        owed = one.residual.clone()
        torch.testing.assert_close(torch.cat(parts) + owed, before)
        assert not owed[:3].any(), "what travels dense leaves no residual"


def test_a_dropped_step_frees_its_memory_without_the_garbage_collector():
    one = engine()
    take(one, 0)
    gc.collect()
    gc.disable()
    try:
        step = one.begin(torch.zeros(1))
        grad = grads(1)[0]
        step.add_bucket(0, grad)
        seen = weakref.ref(grad)
        step.discard()
        del step, grad
        assert seen() is None
    finally:
        gc.enable()


def test_the_dense_phase_delivers_the_residual_of_a_sparse_phase():
    one = engine()
    for seed in range(3):
        take(one, seed)
    owed = one.residual.clone()
    assert owed.any()
    one.settings = Settings(method="dense")
    _, parts = take(one, 7)
    torch.testing.assert_close(torch.cat(parts), torch.cat(grads(7)) + owed)
    assert not one.residual.any()


def test_applying_a_sparse_sum_follows_its_definition():
    entries = Sparse(torch.tensor([1, 3], dtype=torch.int32), torch.tensor([4.0, 8.0]), 5)
    sent = Sparse(torch.tensor([3, 4], dtype=torch.int32), torch.tensor([2.0, 6.0]), 5)
    correction = Sparse(torch.tensor([1], dtype=torch.int32), torch.tensor([0.5]), 5)
    grad, acc = torch.full((5,), 9.0), torch.full((5,), 10.0)
    sums = SparseSum(entries, sent, torch.empty(0), corrections=(correction,))
    apply_sparse_(grad, acc, sums, size=4)
    assert grad.tolist() == [0, 1, 0, 2, 0]
    assert acc.tolist() == [10, 10.5, 10, 8, 10], "only what is in the result leaves the residual"


def test_applying_a_dense_sum_empties_the_residual():
    grad, acc = torch.zeros(2, dtype=torch.bfloat16), torch.ones(2)
    apply_dense_(grad, acc, DenseSum(torch.tensor([4.0, 6.0])), size=2)
    assert grad.tolist() == [2, 3] and acc.tolist() == [0, 0]
    apply_dense_(grad, None, DenseSum(torch.tensor([2.0, 2.0])), size=2)
    assert grad.tolist() == [1, 1]
