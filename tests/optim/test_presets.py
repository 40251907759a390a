# SPDX-License-Identifier: Apache-2.0
"""What keeps the accuracy: each remedy keeps the laws, and leaves alone what is not its own."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, NAdam

import oktopk
from idioms import Net, batch, weights_of
from laws import assert_all_agree, assert_bill_is_bounded, assert_nothing_is_lost, simulated
from oktopk import METHODS
from oktopk.optim.staleness import StalenessCorrection
from oktopk.settings import Settings, ramp

OPTIMIZERS = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
}
SPARSE = {"density": 0.02, "warmup_steps": 3, "check_every": 7}


def built(group, optimizer: str, attached: dict | None = None, seed: int = 0):
    torch.manual_seed(seed)
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.02)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    handle = oktopk.attach(model, optimizer=chosen, **attached) if attached else None
    return model, chosen, handle


def steps(group, model, optimizer, first: int, last: int, rates: float = 1.0) -> None:
    rank = torch.distributed.get_rank(group)
    for step in range(first, last):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        for each in optimizer.param_groups:
            each["lr"] *= rates


def trained(group, optimizer: str, num: int, attached: dict | None = None) -> dict:
    model, chosen, handle = built(group, optimizer, attached)
    steps(group, model, chosen, 0, num, rates=0.97)
    if handle is not None:
        handle.close()
    return weights_of(model)


def resumed(group, optimizer: str, stop: int, num: int) -> tuple[dict, dict]:
    straight = trained(group, optimizer, num, SPARSE)
    model, chosen, handle = built(group, optimizer, SPARSE)
    steps(group, model, chosen, 0, stop, rates=0.97)
    saved = [what.state_dict() for what in (model, chosen, handle)]
    handle.close()
    model, chosen, handle = built(group, optimizer, SPARSE, seed=1)
    for what, state in zip((model, chosen, handle), saved, strict=True):
        what.load_state_dict(state)
    steps(group, model, chosen, stop, num, rates=0.97)
    handle.close()
    return straight, weights_of(model)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("P", [1, 3, 4])
def test_nothing_is_lost_to_an_advance_and_all_agree(method, P):
    ranks = simulated(P, method, 600, 0.05, "heavy", 40, overshoot=0.3, exact_every=7)
    assert_nothing_is_lost(ranks, tolerance=1e-12)
    assert_all_agree(ranks)
    if method == "oktopk":
        assert_bill_is_bounded(ranks)
    plain = simulated(P, method, 600, 0.05, "heavy", 40, exact_every=7)
    differs = not torch.equal(ranks[0][5].total, plain[0][5].total)
    assert differs == (method != "dense")


def test_an_advance_pays_more_and_owes_it():
    (done,) = simulated(1, "topka", 4, 0.5, "heavy", 1, overshoot=0.5)
    kept = done[0].total != 0
    assert kept.sum() == 2
    torch.testing.assert_close(done[0].total[kept], 1.25 * done[0].acc[kept])
    torch.testing.assert_close(done[0].residual[kept], -0.25 * done[0].acc[kept])
    torch.testing.assert_close(done[0].residual[~kept], done[0].acc[~kept])


@pytest.mark.parametrize("method", METHODS)
def test_at_density_one_nothing_is_advanced(method):
    (done,) = simulated(1, method, 50, 1.0, "heavy", 5, overshoot=1.0)
    for step in done:
        assert torch.equal(step.total, step.acc)
        assert not step.residual.any()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_density_one_is_plain_ddp_with_what_suits_the_optimizer(worlds, optimizer):
    plain = worlds.run(2, trained, optimizer, 12)
    attached = worlds.run(2, trained, optimizer, 12, {"density": 1.0, "warmup_steps": 2})
    torch.testing.assert_close(attached[0], plain[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_ranks_agree_with_what_suits_the_optimizer(worlds, optimizer):
    ranks = worlds.run(3, trained, optimizer, 30, SPARSE)
    for other in ranks[1:]:
        for name, value in other.items():
            assert value.isfinite().all(), name
            assert torch.equal(value, ranks[0][name]), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stop", [2, 8])
def test_a_resumed_run_has_the_same_bits(worlds, optimizer, stop):
    for straight, again in worlds.run(2, resumed, optimizer, stop, 16):
        for name, value in straight.items():
            assert torch.equal(value, again[name]), name


def corrected(kind, ages: list[int], beta: float, dtype=torch.float32, **more):
    """A step of Adam with gradients that waited so long: its second moments before and after."""
    settings = Settings(staleness_correction=True)
    weight = torch.zeros(len(ages), 1, dtype=dtype, requires_grad=True)
    optimizer = kind([weight], lr=0.1, betas=(0.9, beta), **more)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = optimizer.state[weight]["exp_avg_sq"].clone()
    stats = SimpleNamespace(phase="sparse", k=1, numel=9, step=100, skipped=False)
    moments = StalenessCorrection(optimizer, {"weight": weight}, settings, last=lambda: stats)
    arrived = torch.tensor([[100 - age] for age in ages], dtype=torch.int32)
    moments.load_state_dict({"weight": arrived})
    weight.grad = torch.full_like(weight, 2.0)
    return optimizer, weight, before, moments


def test_a_sum_that_waited_counts_as_many_small_gradients():
    optimizer, weight, before, moments = corrected(Adam, [1, 9, 100], 0.99)
    optimizer.step()
    taken = [0.01 * 4, (1 - 0.99**9) * 4 / 27, (1 - 0.99**100) * 4 / 1000]
    after = optimizer.state[weight]["exp_avg_sq"]
    torch.testing.assert_close(after, 0.99 * before + torch.tensor(taken).unsqueeze(1))
    assert moments.state_dict()["weight"].flatten().tolist() == [100, 100, 100]


def test_the_order_of_memory_does_not_matter_to_second_moments():
    found = []
    for order in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        weight = torch.randn(2, 3, 2, 2).to(memory_format=order).requires_grad_()
        optimizer = AdamW([weight], lr=0.1)
        stats = SimpleNamespace(phase="sparse", k=1, numel=99, step=9, skipped=False)
        StalenessCorrection(
            optimizer,
            {"weight": weight},
            Settings(staleness_correction=True),
            lambda: stats,  # noqa: B023
        )
        for stats.step in (1, 2, 7):
            weight.grad = torch.randn(2, 3, 2, 2).to(memory_format=order) * (stats.step != 2)
            optimizer.step()
        found.append((weight.detach().clone(), optimizer.state[weight]["exp_avg_sq"].clone()))
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(plain, other)


def test_arrivals_of_another_shape_are_refused():
    weight = torch.zeros(4, 4, requires_grad=True)
    optimizer, settings = Adam([weight]), Settings(staleness_correction=True)
    moments = StalenessCorrection(optimizer, {"weight": weight}, settings, last=lambda: None)
    with pytest.raises(ValueError, match=r"weight arrived have the shape \(2, 2\)"):
        moments.load_state_dict({"weight": torch.zeros(2, 2, dtype=torch.int32)})


def test_amsgrad_remembers_what_was_meant_not_what_its_step_saw():
    optimizer, weight, before, _ = corrected(AdamW, [90], 0.999, amsgrad=True)
    optimizer.step()
    state = optimizer.state[weight]
    assert torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"].maximum(before))
    assert state["exp_avg_sq"] < 0.999 * before + 0.001 * 4


@pytest.mark.parametrize("beta", [0.9, 0.999])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Adam, {"weight_decay": 0.5}),
        (NAdam, {"weight_decay": 0.5}),
        (AdamW, {"amsgrad": True}),
        (AdamW, {"fused": True}),
        (AdamW, {"capturable": False, "foreach": True}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_moments_never_fall_below_zero(kind, more, beta, dtype):
    optimizer, weight, _, _ = corrected(kind, [1, 50, 5000], beta, dtype, **more)

    def clip(*_):
        weight.grad.mul_(0.1)

    optimizer.register_step_pre_hook(clip)
    for _ in range(3):
        optimizer.step()
        assert (optimizer.state[weight]["exp_avg_sq"] >= 0).all()
        assert weight.isfinite().all()


def test_a_closure_is_corrected_by_its_own_gradients():
    optimizer, weight, _, _ = corrected(AdamW, [9, 9], 0.9)
    other, plain, _, _ = corrected(AdamW, [9, 9], 0.9)
    weight.grad = None

    def closure():
        weight.grad = torch.full_like(weight, 2.0)
        return torch.zeros(())

    optimizer.step(closure)
    other.step()
    assert torch.equal(weight, plain)
    assert torch.equal(
        *(o.state[w]["exp_avg_sq"] for o, w in ((optimizer, weight), (other, plain)))
    )


def test_a_skipped_step_changes_nothing():
    optimizer, weight, before, moments = corrected(AdamW, [9, 9], 0.9)
    moments._last().skipped = True
    weight.grad.zero_()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["exp_avg_sq"], 0.9 * before)
    assert moments.state_dict()["weight"].flatten().tolist() == [91, 91]


def test_a_step_that_was_broken_off_leaves_no_lowered_moments():
    """The hook before the step lowers them, the one after it sets them: the second never came."""
    optimizer, weight, before, _ = corrected(Adam, [1, 9, 100], 0.99)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    breaking = optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert not torch.equal(optimizer.state[weight]["exp_avg_sq"], before)
    saved = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    assert torch.equal(saved, before)  # who saves it gets the real ones
    breaking.remove()
    optimizer.step()  # nothing is late any more: it was taken down as arrived
    torch.testing.assert_close(optimizer.state[weight]["exp_avg_sq"], 0.99 * before + 0.01 * 4)


@pytest.mark.parametrize("wrong", [{"max_beta1": 0.5}, {"staleness_correction": True}])
def test_what_is_for_adam_is_refused_for_others(wrong):
    weight = torch.zeros(2, requires_grad=True)
    with pytest.raises(TypeError, match="this is SGD"):
        StalenessCorrection(SGD([weight], lr=0.1), {}, Settings(**wrong), last=lambda: None)


def moments_of(group) -> tuple:
    """Betas that the user's hooks see around the step, and the arrivals a state tells."""
    model, chosen, handle = built(group, "adamw", SPARSE | {"ramp_steps": 2, "max_beta1": 0.3})
    seen = []
    chosen.register_step_post_hook(lambda *_: seen.append(chosen.param_groups[0]["betas"][0]))
    for step in range(6):
        steps(group, model, chosen, step, step + 1)
        seen.append(chosen.param_groups[0]["betas"][0])
    arrived = handle.state_dict()["arrived"]["middle.weight"]
    handle.close()
    return seen, arrived


def test_a_state_tells_when_entries_arrived_and_nobody_sees_a_lowered_beta(worlds):
    seen, arrived = worlds.run(2, moments_of)[0]
    assert seen == [0.9] * 12
    assert arrived.dtype == torch.int32
    assert set(arrived.unique().tolist()) <= {2, 3, 4, 5}
    assert (arrived == 5).any() and (arrived == 2).any()


def without_optimizer(group) -> str:
    model = DistributedDataParallel(Net(), process_group=group)
    try:
        oktopk.attach(model, max_beta1=0.5)
    except TypeError as error:
        return str(error)
    return "accepted"


def test_what_needs_an_optimizer_says_so(worlds):
    (said,) = worlds.run(1, without_optimizer)
    assert "optimizer=" in said


@pytest.mark.parametrize("name", ["max_beta1", "staleness_correction"])
def test_a_reducer_has_no_optimizer_to_correct(name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        oktopk.Reducer(10, **{name: 0.0 if name == "max_beta1" else True})


@pytest.mark.parametrize("given", [1, 5, 256, 1000])
def test_a_ramp_falls_to_the_density_in_just_its_steps(given):
    stairs = ramp(given, 0.02)
    assert sum(steps for steps, _ in stairs) == given
    densities = [density for _, density in stairs] + [0.02]
    assert densities[0] == 0.25 and densities == sorted(densities, reverse=True)
    assert all(first / second < 1.6 for first, second in pairwise(densities)) or given < 6


def test_a_ramp_to_nowhere_is_none():
    assert ramp(0, 0.02) == () == ramp(100, 0.3)


@pytest.mark.parametrize("wrong", [{"overshoot": -0.1}, {"overshoot": 2.0}, {"max_beta1": 1.0}])
def test_wrong_preset_fields_are_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        Settings(**wrong)
