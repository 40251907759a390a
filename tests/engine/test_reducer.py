# SPDX-License-Identifier: Apache-2.0
"""The reducer as a user meets it: settings, errors, warm-up, statistics, state."""

from __future__ import annotations

import io
import json
from math import nan

import pytest
import torch
import torch.distributed as dist

import oktopk
from oktopk import METHODS, Reducer, simulate
from oktopk.comm.simulated import single_rank_comm
from oktopk.exchange.engine import Engine
from oktopk.exchange.layout import Bucket
from oktopk.settings import DENSITY, Settings
from streams import STREAMS

over_methods = pytest.mark.parametrize("method", METHODS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"density": 1.5}, r"density must be in \(0, 1\], got 1.5"),
        ({"density": float("nan")}, "got nan"),
        ({"method": "topk"}, "unknown method 'topk'; known methods: dense, topka, .*oktopk"),
        ({"warmup_steps": -1}, "warmup_steps must be 0 or more, got -1"),
        ({"exact_every": 0}, "exact_every must be 1 or more, got 0"),
        ({"bounds_every": 0}, "bounds_every must be 1 or more, got 0"),
    ],
)
def test_a_bad_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Reducer(10, **settings)


@pytest.mark.parametrize("numel", [-1, 2**31, 10**12])
def test_a_size_beyond_int32_is_refused(numel):
    with pytest.raises(ValueError, match=f"got {numel}"):
        Reducer(numel)


def test_a_bad_gradient_is_named():
    with pytest.raises(TypeError, match=r"float64, got torch.int64"):
        Reducer(4).reduce_(torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"flat contiguous gradient of 4 elements, got shape \(5,"):
        Reducer(4).reduce_(torch.ones(5))
    with pytest.raises(ValueError, match="strides"):
        Reducer(4).reduce_(torch.ones(8)[::2])


def reduce_differently(group, what: str) -> str:
    """Rank 1 differs from the others; every rank must say the same of it."""
    rank = dist.get_rank(group)
    numel, dtype, more = 100, torch.float32, {}
    if rank == 1:
        numel = 90 if what == "numel" else numel
        dtype = {"dtype": torch.float16, "integer": torch.int64}.get(what, dtype)
        more = {"density": {"density": 0.5}, "method": {"method": "topka"}}.get(what, more)
    try:
        Reducer(numel, group=group, **more).reduce_(torch.ones(numel, dtype=dtype))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("numel", "numel is 100 on ranks 0, 2 but 90 on rank 1"),
        ("dtype", "gradient dtype is torch.float32 on ranks 0, 2 but torch.float16 on rank 1"),
        ("integer", "gradient dtype is torch.float32 on ranks 0, 2 but torch.int64 on rank 1"),
        ("density", f"density is {DENSITY} on ranks 0, 2 but 0.5 on rank 1"),
        ("method", "method is oktopk on ranks 0, 2 but topka on rank 1"),
    ],
)
def test_ranks_that_disagree_find_out_together(world, what, message):
    for said in world.run(3, reduce_differently, what):
        assert message in said


@over_methods
def test_warm_up_is_dense_then_sparse(method):
    def main(comm):
        reducer = Reducer(1000, method=method, density=0.05, warmup_steps=3, comm=comm)
        return [reducer.reduce_(STREAMS["gaussian"](1000, comm.rank, s)) for s in range(6)]

    for done in simulate(3, main):
        assert [s.step for s in done] == list(range(6))
        for stats in done[:3] if method != "dense" else done:
            assert (stats.phase, stats.k, stats.local, stats.result) == ("dense", 1000, 1000, 1000)
            assert (stats.sparsity, stats.compression_ratio) == (0.0, 1.0)
            assert stats.bytes_sent == stats.bytes_dense == 2 * 8 * 1000 * 2 // 3
        for stats in done[3:] if method != "dense" else []:
            assert (stats.phase, stats.k) == ("sparse", 50)
            assert stats.sparsity == 1 - stats.result / 1000
            assert stats.compression_ratio == stats.bytes_dense / stats.bytes_sent
            assert stats.local_threshold > 0 and stats.global_threshold > 0


def test_thresholds_are_the_smallest_magnitudes_kept():
    grad = torch.arange(1.0, 101.0)
    stats = Reducer(100, density=0.1, wire="fp32").reduce_(grad)
    assert (stats.local_threshold, stats.global_threshold) == (91.0, 91.0)
    assert grad.tolist() == [0.0] * 90 + [float(v) for v in range(91, 101)]


def test_one_process_needs_no_process_group():
    reducer = Reducer(100, density=0.1)
    grad = torch.arange(100.0)
    stats = reducer.reduce_(grad)
    assert (stats.result, stats.bytes_sent, stats.messages) == (10, 0, 0)
    assert torch.equal(grad + reducer.residual, torch.arange(100.0))


def test_ties_go_to_the_lower_index():
    grad = torch.ones(10)
    Reducer(10, density=0.3).reduce_(grad)
    assert grad.tolist() == [1.0] * 3 + [0.0] * 7


@over_methods
@pytest.mark.parametrize("warmup", [2])
def test_a_resumed_run_has_the_same_bits(method, warmup):
    """Stopped after any of many steps; saved with torch.save, loaded safely."""
    steps = 38

    def make(comm):
        return Reducer(700, method=method, density=0.05, warmup_steps=warmup, comm=comm)

    def straight(comm):
        reducer, states, grads = make(comm), [], []
        for step in range(steps):
            buffer = io.BytesIO()
            torch.save(reducer.state_dict(), buffer)
            states.append(buffer)
            grads.append(STREAMS["heavy"](700, comm.rank, step))
            reducer.reduce_(grads[-1])
        return states, grads

    saved = simulate(3, straight)
    for stop in (1, 3, 35):

        def resumed(comm, stop=stop):
            reducer = make(comm)
            saved[comm.rank][0][stop].seek(0)
            reducer.load_state_dict(torch.load(saved[comm.rank][0][stop], weights_only=True))
            for step in range(stop, steps):
                grad = STREAMS["heavy"](700, comm.rank, step)
                reducer.reduce_(grad)
                assert torch.equal(grad, saved[comm.rank][1][step]), (stop, step)

        simulate(3, resumed)


def test_a_state_of_another_model_is_refused():
    state = Reducer(10).state_dict()
    with pytest.raises(ValueError, match="numel=10, this is 11"):
        Reducer(11).load_state_dict(state)
    with pytest.raises(ValueError, match="method='oktopk', this is topka"):
        Reducer(10, method="topka").load_state_dict(state)


def test_an_error_on_one_simulated_rank_ends_all():
    def main(comm):
        if comm.rank == 2:
            raise ZeroDivisionError("rank 2")
        comm.all_gather_header(torch.ones(1), stage="a")

    with pytest.raises(ZeroDivisionError, match="rank 2"):
        simulate(4, main)


def test_a_simulated_rank_that_leaves_early_is_no_hang():
    def main(comm):
        if comm.rank != 1:
            comm.all_gather_header(torch.ones(1), stage="a")

    with pytest.raises(RuntimeError, match="never enter"):
        simulate(3, main)


def test_an_exit_on_one_simulated_rank_is_seen():
    def main(comm):
        if comm.rank == 1:
            raise SystemExit(3)
        comm.all_gather_header(torch.ones(1), stage="a")

    with pytest.raises(SystemExit):
        simulate(3, main)


def test_ranks_that_loaded_different_states_find_out():
    def main(comm):
        reducer = Reducer(100, comm=comm)
        old = reducer.state_dict()
        reducer.reduce_(torch.ones(100))
        if comm.rank == 1:
            reducer.load_state_dict(old)
        else:
            reducer.load_state_dict(reducer.state_dict())
        reducer.reduce_(torch.ones(100))

    with pytest.raises(ValueError, match="step is 1 on rank 0 but 0 on rank 1"):
        simulate(2, main)


@over_methods
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_on_one_rank_is_skipped_by_all(method, warmup, bad):
    def main(comm):
        reducer = Reducer(300, method=method, density=0.1, warmup_steps=warmup, comm=comm)
        for step in range(5):
            grad = STREAMS["gaussian"](300, comm.rank, step)
            before = reducer.residual.clone()
            if step == 2:
                grad *= 1e30  # so large that nothing of the residual is left in their sum
            if step == 2 and comm.rank == 1:
                grad[17] = bad
            stats = reducer.reduce_(grad)
            assert stats.skipped == (step == 2)
            if step == 2:
                assert not grad.any() and stats.result == 0
                assert torch.equal(reducer.residual, before), "what was owed is owed, to the bit"
            assert reducer.residual.isfinite().all() and grad.isfinite().all()
        return grad

    grads = simulate(3, main)
    assert all(torch.equal(grad, grads[0]) for grad in grads)


@over_methods
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("num", [1, 3, 40, 300])
def test_a_selection_has_every_nan(method, bad, num):
    """Many or few, whether the last threshold finds them or the exact one: nobody else looks."""
    reducer = Reducer(300, method=method, density=0.1, exact_every=2)
    for step in range(6):
        grad = STREAMS["gaussian"](300, 0, step)
        if step > 1:
            grad[torch.randperm(300, generator=torch.Generator().manual_seed(step))[:num]] = bad
        assert reducer.reduce_(grad).skipped == (step > 1)
        assert reducer.residual.isfinite().all()


def test_a_nan_is_seen_in_a_group_that_may_offer_nothing():
    engine = Engine(
        Settings(density=0.1, group_numel=100), single_rank_comm(), [Bucket(100), Bucket(100)]
    )
    for step in range(4):  # the fourth exchanges group by group
        current = engine.begin(torch.zeros(1))
        assert current.plan.whole_model == (step < 3)
        current.add_bucket(0, torch.randn(100) + 9)
        current.add_bucket(
            1, torch.zeros(100).index_fill(0, torch.tensor([7]), 1e-9 if step < 3 else nan)
        )
        assert engine.finish(current).skipped == (step == 3)
    assert engine.quotas == [20, 0] and engine.residual.isfinite().all()


def test_a_nan_can_be_raised_or_delivered():
    bad = torch.tensor([1.0, float("nan")])
    with pytest.raises(FloatingPointError, match="rank 0, step 0: a gradient had a NaN or Inf"):
        Reducer(2, on_nonfinite="raise").reduce_(bad.clone())
    Reducer(2, on_nonfinite="deliver").reduce_(bad)
    assert bad.isnan().all()


def test_a_schedule_lowers_the_density_step_by_step():
    reducer = Reducer(1000, density=0.02, warmup_steps=1, schedule=((2, 0.25), (1, 0.06)))
    done = [reducer.reduce_(torch.randn(1000)) for _ in range(6)]
    assert [stats.k for stats in done] == [1000, 250, 250, 60, 20, 20]
    # entries of one bin are trimmed together, so a result may be one or two short
    assert [stats.result for stats in done] == pytest.approx([stats.k for stats in done], abs=2)


def test_stats_are_ready_for_json():
    facts = Reducer(100, density=0.1).reduce_(torch.randn(100)).as_dict()
    assert json.loads(json.dumps(facts)) == facts
    assert {"sparsity", "compression_ratio", "bytes_sent", "k", "phase", "exposed"} <= set(facts)


def test_public_names():
    assert set(oktopk.__all__) == {
        "METHODS",
        "Comm",
        "ExchangeError",
        "FSDPHandle",
        "Handle",
        "LocalSteps",
        "MessageError",
        "NonfiniteError",
        "Policy",
        "Reducer",
        "ReplicaError",
        "Settings",
        "StepStats",
        "__version__",
        "attach",
        "attach_fsdp",
        "local_steps",
        "simulate",
    }


def test_a_failed_exchange_is_undone_at_once(monkeypatch):
    reducer = Reducer(1000, density=0.05)
    for step in range(3):
        reducer.reduce_(torch.randn(1000, generator=torch.Generator().manual_seed(step)))
    owed, grad = reducer.residual.clone(), torch.randn(1000)

    def fail(*_, **__):
        raise oktopk.ExchangeError("a connection is gone")

    with monkeypatch.context() as patched:
        patched.setattr(reducer.comm, "exchange", fail)
        with pytest.raises(oktopk.ExchangeError):
            reducer.reduce_(grad)
    assert torch.equal(reducer.residual, owed)
    grad.copy_(new := torch.randn(1000))
    reducer.reduce_(grad)
    torch.testing.assert_close(grad + reducer.residual, owed + new)
