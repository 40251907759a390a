# SPDX-License-Identifier: Apache-2.0
"""`attach` in training loops as people write them: plain DDP at density 1, one result at 2 %."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import IDIOMS, SPARSE, Net, assert_same_bits, batch, build, one_step, train
from oktopk import METHODS, Policy
from oktopk.methods import AUTO_CHOICES


@pytest.mark.parametrize("name", IDIOMS)
def test_density_one_is_plain_ddp(worlds, name):
    plain = worlds.run(2, train, name, 12)
    attached = worlds.run(2, train, name, 12, {"density": 1.0, "warmup_steps": 2})
    for want, got in zip(plain[0], attached[0], strict=True):
        torch.testing.assert_close(got, want)


def test_one_rank_alone_is_plain_ddp_and_may_be_sparse(worlds):
    plain = worlds.run(1, train, "plain", 12)
    attached = worlds.run(1, train, "plain", 12, {"density": 1.0, "warmup_steps": 2})
    torch.testing.assert_close(attached, plain)
    sparse = worlds.run(1, train, "plain", 12, SPARSE)[0][0]
    assert all(value.isfinite().all() for value in sparse.values())


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in IDIOMS if n != "plain")]
)
def test_ranks_have_the_same_bits_after_300_steps_at_two_percent(worlds, name):
    assert_same_bits(worlds.run(2, train, name, 300, {**SPARSE, "check_every": 100}, timeout=110))


@pytest.mark.parametrize("name", [name for name in IDIOMS if name != "plain"])
def test_ranks_have_the_same_bits_in_every_idiom(worlds, name):
    assert_same_bits(worlds.run(2, train, name, 40, {**SPARSE, "check_every": 10}))


def test_four_ranks_have_the_same_bits_beyond_new_thresholds_and_bounds(worlds):
    assert_same_bits(worlds.run(4, train, "plain", 70, SPARSE, timeout=100))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scope", ["model", "bucket"])
def test_every_method_keeps_the_ranks_together(worlds, method, scope):
    settings = {**SPARSE, "method": method, "scope": scope}
    assert_same_bits(worlds.run(3, train, "plain", 12, settings))


def in_dtype(group, dtype: torch.dtype, attached: dict | None, steps: int) -> tuple:
    """The first gradients, the weights at the end, and the dtypes of what is owed."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().to(dtype), process_group=group, bucket_cap_mb=0.02)
    handle = oktopk.attach(model, **attached) if attached is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = None
    for step in range(steps):
        x, y = batch(torch.distributed.get_rank(group), step)
        optimizer.zero_grad()
        cross_entropy(model(x.to(dtype)), y).backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    owed = {residual.dtype for residual in handle.residuals.values()} if handle else set()
    if handle is not None:
        handle.close()
    return first, {name: p.detach().clone() for name, p in model.named_parameters()}, owed


@pytest.mark.parametrize(
    ("dtype", "owed"),
    [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
    ids=["bfloat16", "float64"],
)
def test_models_of_other_dtypes(worlds, dtype, owed):
    plain = worlds.run(2, in_dtype, dtype, None, 1)
    whole = worlds.run(2, in_dtype, dtype, {"density": 1.0, "warmup_steps": 0}, 1)
    torch.testing.assert_close(whole[0][0], plain[0][0])
    ranks = worlds.run(2, in_dtype, dtype, {"density": 0.05, "warmup_steps": 2}, 12)
    assert_same_bits([[weights] for _, weights, _ in ranks])
    for _, weights, dtypes in ranks:
        assert dtypes == {owed} and {value.dtype for value in weights.values()} == {dtype}


def run_and_watch(group, steps: int, attached: dict, policy: dict | None = None) -> list:
    """What a run tells of every step: stats, and what is owed plus applied against what came in."""
    rank = torch.distributed.get_rank(group)
    seen = []
    more = {"policy": Policy(**policy)} if policy is not None else {}
    attached = {**attached, **more, "on_step": seen.append}
    model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, attached)
    for step in range(steps):
        one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
        assert handle.stats is seen[-1]
    handle.close()
    return seen


@pytest.mark.parametrize("least", [1, 2**25])
def test_stats_of_every_step_are_complete(worlds, least):
    asked = SPARSE | {"group_numel": least, "short_bytes": 0}
    for seen in worlds.run(2, run_and_watch, 40, asked):
        assert [s.step for s in seen] == list(range(40))
        assert {s.phase for s in seen[:3]} == {"dense"}
        assert {s.phase for s in seen[3:]} == {"sparse"}
        for stats in seen[3:]:
            assert 0.9 * stats.k <= stats.local <= stats.k
            assert 0.9 * stats.k <= stats.result <= 1.1 * stats.k
            assert 0 < stats.bytes_sent < stats.bytes_dense
            assert stats.local_threshold > 0
        whole = [s.step - 3 for s in seen[3:] if s.stages["split"].messages_sent == 2]
        at_once = [0, 1, 2, 4, 8, 16, 32] if least == 1 else list(range(37))
        assert whole == at_once, "these exchange the model at once: a header and a letter"


def test_a_schedule_lowers_the_density_step_by_step(worlds):
    settings = {"density": 0.02, "warmup_steps": 2, "schedule": ((3, 0.25), (1, 0.06))}
    total = sum(p.numel() for p in Net().parameters())
    densities = [1.0] * 2 + [0.25] * 3 + [0.06] + [0.02] * 2
    for seen in worlds.run(2, run_and_watch, 8, settings, {"vectors": False, "below": 0}):
        assert [s.k for s in seen] == [round(density * total) for density in densities]
        assert [s.result for s in seen] == pytest.approx([s.k for s in seen], rel=0.1)


def test_dense_parameters_ride_along(worlds):
    """Biases, norms and the small head arrive whole; they cost no message of their own."""
    without = worlds.run(2, run_and_watch, 12, SPARSE, {"vectors": False, "below": 0})[0]
    with_them = worlds.run(2, run_and_watch, 12, SPARSE)[0]
    total = sum(p.numel() for p in Net().parameters())
    dense = sum(p.numel() for p in Net().parameters() if Policy().is_dense("", p))
    assert with_them[-1].k == round(0.02 * (total - dense)) + dense
    assert without[-1].k == round(0.02 * total)
    assert with_them[-1].messages == without[-1].messages


def owed_and_applied(group, idiom: str, steps: int) -> list:
    """Per step: the gradient this rank computed, the average it got, and what it owes after."""
    rank = torch.distributed.get_rank(group)
    attached = {"density": 0.05, "warmup_steps": 0}
    model, called, _, handle = build(group, IDIOMS[idiom], 0, attached)
    twin = Net()
    twin.load_state_dict(model.module.state_dict())
    done = []
    for step in range(steps):
        x, y = batch(rank, step)
        for net in (model, twin):
            net.zero_grad()
        use_branch = not (IDIOMS[idiom].skips_branch and step % 3)
        cross_entropy(called(x, use_branch), y).backward()
        cross_entropy(twin(x, use_branch), y).backward()
        done.append(
            {
                name: (grad_of(g), grad_of(p), handle.residuals[name].clone())
                for (name, p), g in zip(
                    model.module.named_parameters(), twin.parameters(), strict=True
                )
            }
        )
        for p, g in zip(model.parameters(), twin.parameters(), strict=True):
            g.grad = None
            with torch.no_grad():
                p.sub_(0.01 * grad_of(p))
                g.copy_(p)
    handle.close()
    return done


def grad_of(parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


@pytest.mark.parametrize("idiom", ["plain", "find_unused_parameters"])
def test_nothing_is_lost_from_step_zero_through_the_rebuild(worlds, idiom):
    """DDP rebuilds its buckets after the first step; what is owed follows the parameters.

    It delivers nothing to a parameter no rank used: what is owed there must stay owed.
    """
    ranks = worlds.run(3, owed_and_applied, idiom, 12)
    owed = dict.fromkeys(ranks[0][0], 0.0)
    for done in zip(*ranks, strict=True):
        for name in owed:
            came = sum(rank[name][0].double() for rank in done) + owed[name]
            left = sum(rank[name][2].double() for rank in done)
            applied = done[0][name][1].double() * len(done)
            torch.testing.assert_close(came, applied + left, rtol=1e-5, atol=1e-6)
            owed[name] = left


def chosen_by_itself(group) -> tuple[str, list[str]]:
    """The method `auto` picks, and what it says on rank 0; then a few steps with it."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("oktopk")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    rank = torch.distributed.get_rank(group)
    try:
        attached = {"method": "auto", "warmup_steps": 0}
        model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, attached)
        for step in range(3):
            one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
        method = handle.settings.method
        handle.close()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return method, [line for line in said if line.startswith("auto:")]


def test_auto_picks_one_method_for_all_ranks_and_says_why(worlds):
    (first, said), (second, silent) = worlds.run(2, chosen_by_itself)
    assert first == second and first in AUTO_CHOICES
    assert silent == [] and len(said) == 1
    assert all(f"{name} " in said[0] for name in AUTO_CHOICES) and "latency" in said[0]


def resumed_by_itself(group) -> list[str]:
    """The method of a run that `auto` began otherwise than it would go on: before and after."""
    rank = torch.distributed.get_rank(group)
    fixed = {"method": "gtopk", "warmup_steps": 0}
    states = []
    for attached in (fixed, {"method": "auto", "warmup_steps": 0}):
        model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, attached)
        methods = [handle.settings.method]
        if states:
            handle.load_state_dict(states[-1])
        for step in range(3):
            one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
        methods.append(handle.settings.method)
        states.append(handle.state_dict())
        handle.close()
    return methods


def test_auto_goes_on_with_the_method_of_a_loaded_state(worlds):
    for before, after in worlds.run(2, resumed_by_itself):
        assert before in AUTO_CHOICES and after == "gtopk"
