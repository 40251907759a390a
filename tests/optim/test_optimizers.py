# SPDX-License-Identifier: Apache-2.0
"""Which optimizers get what, and that around their steps nothing is seen or left behind."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

import oktopk
from idioms import Net, batch, weights_of
from oktopk import kernels
from oktopk.kernels import reference
from oktopk.optim.presets import ADAM, DESCENT, MOMENTUM, OTHER, QUANTISED, apply_preset, preset_for
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.optim.staleness import StalenessCorrection
from oktopk.settings import Settings
from optimizers import (
    Adam8bit,
    AdamL2,
    AdamWScheduleFree,
    FusedAdam,
    Groups,
    Lion,
    PagedAdam,
    Prodigy,
)

BETAS = {"betas": (0.9, 0.999)}
SGD_GROUPS = {"momentum": 0.9, "dampening": 0.0, "nesterov": False}
KINDS = [
    (lambda p: SGD(p, lr=0.1), DESCENT),
    (lambda p: SGD(p, lr=0.1, momentum=0.9), MOMENTUM),
    (lambda p: Groups(p, **SGD_GROUPS), MOMENTUM),  # apex' FusedSGD, timm's SGDW
    (lambda p: Groups(p, **SGD_GROUPS, eps=1e-8, trust_coefficient=0.001), OTHER),  # LARS
    (lambda p: Groups(p, momentum=0.9), OTHER),  # signum
    (Adam, ADAM),
    (lambda p: AdamW(p, fused=True), ADAM),
    (lambda p: AdamW(p, foreach=True, eps=0.0), ADAM),
    (NAdam, ADAM),
    (RAdam, ADAM),
    (FusedAdam, ADAM),
    (AdamL2, ADAM),
    (lambda p: AdamWScheduleFree(p, **BETAS, eps=1e-8), ADAM),
    (lambda p: Adam8bit(p, **BETAS, eps=1e-8), QUANTISED),
    (lambda p: Groups(p, betas=(0.9, 0.99, 0.999), eps=1e-8), OTHER),  # Adan
    (lambda p: Lion(p, **BETAS), OTHER),
    (lambda p: Lion(p, **BETAS, eps=0.0), OTHER),
    (Adamax, OTHER),
    (Adagrad, OTHER),
    (Rprop, OTHER),
    (lambda p: RMSprop(p, momentum=0.9), OTHER),
    (torch.optim.Muon, OTHER),
    (torch.optim.Adafactor, OTHER),
]


@pytest.mark.parametrize(("kind", "expected"), KINDS)
def test_an_optimizer_is_known_by_what_its_groups_have(kind, expected):
    optimizer = kind([torch.zeros(2, 2, requires_grad=True)])
    assert preset_for(optimizer) is expected
    settings = apply_preset(Settings(), optimizer, {})
    assert settings.rescale_with_lr == (expected in (DESCENT, MOMENTUM))
    assert settings.staleness_correction == (expected is ADAM)
    assert settings.max_beta1 is None  # for nobody who did not ask


def test_what_wraps_an_optimizer_is_looked_through():
    optimizer = AdamW([torch.zeros(2, requires_grad=True)])
    wrapped = SimpleNamespace(optimizer=optimizer)  # Accelerate's
    scheduler = SimpleNamespace(scheduler=StepLR(optimizer, 1))
    for outer in (optimizer, wrapped, StepLR(optimizer, 1), scheduler):
        assert ResidualScaling(outer).optimizer is optimizer


@contextmanager
def logged():
    """Lines of the library's log, with their levels."""
    lines: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    log = logging.getLogger("oktopk")
    before, log.level = log.level, logging.INFO
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.level = before


def warned(group, kind: str) -> list[str]:
    model = DistributedDataParallel(Net(), process_group=group)
    optimizer = {"RMSprop": RMSprop, "AdamW": AdamW}[kind](model.parameters())
    with logged() as lines:
        oktopk.attach(model, optimizer=optimizer, warmup_steps=128, total_steps=7).close()
    return [text for level, text in lines if level == "WARNING"]


def test_rank_0_alone_warns_of_an_unknown_optimizer_and_of_a_short_run(worlds):
    said, others = worlds.run(2, warned, "RMSprop")
    assert len(said) == 2 and others == []
    assert "for RMSprop: plain error feedback" in said[0]
    assert "residuals are not scaled with the learning rate" in said[0]
    assert "the run has 7 steps" in said[1]
    known, _ = worlds.run(2, warned, "AdamW")
    assert len(known) == 1


def contained(group) -> tuple:
    """What a NaN of the last rank does to a run that has a scaler it does not use."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    handle = oktopk.attach(model, optimizer=optimizer, scaler=scaler, warmup_steps=1)
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    for step in range(4):
        x, y = batch(rank, step)
        x = x * float("nan") if step == 2 and rank == size - 1 else x
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    found = handle.settings.on_nonfinite, handle.skipped_steps, handle.driver.scaling.loss_scale
    handle.close()
    return found, all(w.isfinite().all() for w in weights_of(model).values())


def test_a_disabled_scaler_is_no_scaler(worlds):
    for found, finite in worlds.run(2, contained):
        assert found == ("skip", 1, 1.0)
        assert finite


# -- sharded over the ranks ---------------------------------------------------------------------


def sharded(group, kind: str, more: dict, num: int = 14) -> tuple[dict, dict]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.02)
    made = {"adamw": AdamW, "kin": FusedAdam}.get(kind)
    if made is None:
        # here, in a rank: the import warns that torch itself uses what it deprecates
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), AdamW, process_group=group, lr=0.01, amsgrad=True
        )
    else:
        optimizer = made(model.parameters(), lr=0.01, amsgrad=True)
    asked = {"density": 0.02, "warmup_steps": 3, "check_every": 5} | more
    handle = oktopk.attach(model, optimizer=optimizer, **asked)
    assert handle.settings.staleness_correction
    rank = torch.distributed.get_rank(group)
    for step in range(num):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    arrived = handle.state_dict()["arrived"]
    handle.close()
    return weights_of(model), arrived


@pytest.mark.parametrize("more", [{}, {"max_beta1": 0.3}, {"warmup_steps": 0, "ramp_steps": 0}])
def test_a_sharded_adam_and_a_kin_of_adam_train_as_adam_does(worlds, more):
    (weights, arrived), *_ = worlds.run(3, sharded, "adamw", more)
    others = worlds.run(3, sharded, "zero", more)
    if more.get("warmup_steps") != 0:  # an unknown class is watched for a step with state first
        others += worlds.run(3, sharded, "kin", more)
    assert any((steps < 13).any() for steps in arrived.values())
    for theirs, their_arrived in others:
        for name, value in weights.items():
            assert torch.equal(value, theirs[name]), name
        for name, steps in arrived.items():
            assert torch.equal(steps, their_arrived[name]), name


# -- around one step ----------------------------------------------------------------------------


class Around:
    """An optimizer over one model or several, and handles' moments, without a network."""

    def __init__(self, make, shapes=((3, 4),), dtype=torch.float32, **settings) -> None:
        torch.manual_seed(0)
        self.sparse = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        self.dense = [nn.Parameter(torch.randn(4).to(dtype))]
        self.optimizer = make([*self.sparse, *self.dense])
        self.stats = SimpleNamespace(phase="dense", k=1, numel=9, step=-1, skipped=False)
        self.settings = Settings(**settings)

    def attach(self, parameters=None) -> StalenessCorrection:
        chosen = set(self.sparse if parameters is None else parameters)
        named = {f"p{i}": p for i, p in enumerate(self.sparse) if p in chosen}
        return StalenessCorrection(self.optimizer, named, self.settings, lambda: self.stats)

    def exchange(self, phase: str = "sparse") -> None:
        self.stats = SimpleNamespace(**vars(self.stats) | {"phase": phase})
        self.stats.step += 1

    def step(self, phase: str = "sparse") -> None:
        self.exchange(phase)
        generator = torch.Generator().manual_seed(self.stats.step)
        for p in (*self.sparse, *self.dense):
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            if phase == "sparse" and p.dim() > 1:
                p.grad *= torch.rand(p.shape, generator=generator) < 0.4
        self.optimizer.step()

    def run(self, *phases: str) -> list[torch.Tensor]:
        for phase in phases:
            self.step(phase)
        return [p.detach().clone() for p in (*self.sparse, *self.dense)]


PHASES = ("dense", "dense", "sparse", "sparse", "sparse")
ADAMS = {
    "adam": lambda p, **k: Adam(p, lr=0.1, weight_decay=0.1, **k),
    "amsgrad": lambda p, **k: AdamW(p, lr=0.1, amsgrad=True, **k),
    "foreach": lambda p, **k: AdamW(p, lr=0.1, foreach=True, **k),
    "fused": lambda p, **k: AdamW(p, lr=0.1, fused=True, **k),
    "nadam": lambda p, **k: NAdam(p, lr=0.1, **k),
    "radam": lambda p, **k: RAdam(p, lr=0.1, **k),
}


@pytest.mark.parametrize("name", ADAMS)
def test_a_lowered_beta1_is_exact_and_only_for_what_travels_sparse(name):
    """As if the sparse parameters had a group of their own, whose beta1 falls when it begins."""
    one = Around(ADAMS[name], max_beta1=0.3)
    one.attach()
    lowered = one.run(*PHASES)
    two = Around(ADAMS[name])
    groups = [{"params": two.sparse}, {"params": two.dense}]
    two.optimizer = ADAMS[name](groups)
    two.run("dense", "dense")
    two.optimizer.param_groups[0]["betas"] = (0.3, 0.999)
    for ours, theirs in zip(lowered, two.run("sparse", "sparse", "sparse"), strict=True):
        assert torch.equal(ours, theirs)
    assert one.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert len(one.optimizer.param_groups) == 1


def test_a_beta1_in_a_tensor_is_lowered_too():
    betas = torch.tensor(0.9), torch.tensor(0.999)
    found = []
    for given in (betas, (0.9, 0.999)):
        around = Around(lambda p: Adam(p, lr=0.1, betas=given, foreach=False), max_beta1=0.3)  # noqa: B023
        around.attach()
        found.append(around.run(*PHASES))
        assert around.optimizer.param_groups[0]["betas"] == given
    torch.testing.assert_close(*found)


def test_a_beta1_below_the_cap_stays():
    plain, capped = (Around(lambda p: Adam(p, betas=(0.2, 0.99)), max_beta1=b) for b in (None, 0.3))
    capped.attach()
    for ours, theirs in zip(capped.run(*PHASES), plain.run(*PHASES), strict=True):
        assert torch.equal(ours, theirs)


def test_two_handles_over_one_optimizer_compose_and_restore():
    """As one handle over both models; when one is closed, the other goes on."""
    shapes = ((3, 4), (5, 2))
    one = Around(AdamW, shapes, max_beta1=0.3, staleness_correction=True)
    one.attach()
    two = Around(AdamW, shapes, max_beta1=0.3, staleness_correction=True)
    groups = two.optimizer.param_groups[:]
    first, second = (two.attach([p]) for p in two.sparse)
    for ours, theirs in zip(two.run(*PHASES), one.run(*PHASES), strict=True):
        assert torch.equal(ours, theirs)
    assert two.optimizer.param_groups == groups and groups[0]["betas"] == (0.9, 0.999)
    first.close()
    two.step()
    second.close()
    assert two.optimizer.param_groups == groups
    assert not two.optimizer._optimizer_step_pre_hooks
    assert not two.optimizer._optimizer_step_post_hooks


def shared(group) -> tuple:
    """One optimizer over two attached models, of which one is let go before the end."""
    torch.manual_seed(0)
    models = [
        DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.02) for _ in range(2)
    ]
    optimizer = AdamW([p for model in models for p in model.parameters()], lr=0.01)
    asked = {"density": 0.02, "warmup_steps": 2, "max_beta1": 0.3}
    handles = [oktopk.attach(model, optimizer=optimizer, **asked) for model in models]
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["betas"]))
    for step in range(6):
        x, y = batch(torch.distributed.get_rank(group), step)
        optimizer.zero_grad()
        for model in models:
            cross_entropy(model(x), y).backward()
        optimizer.step()
    groups = [group["betas"] for group in optimizer.param_groups]
    for handle in handles:
        handle.close()
        groups += [group["betas"] for group in optimizer.param_groups]
    return seen, groups


def test_two_models_of_one_optimizer_leave_it_its_own_beta1(worlds):
    for seen, groups in worlds.run(2, shared):
        assert seen == [(0.9, 0.999)] * 6
        assert groups == [(0.9, 0.999)] * 3


def interrupted(around: Around) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    breaking = around.optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        around.step()
    breaking.remove()


def test_after_an_interrupt_between_the_hooks_all_is_restored():
    around = Around(AdamW, ((3, 4), (5, 2)), max_beta1=0.3, staleness_correction=True)
    for p in around.sparse:
        around.attach([p])
    around.run(*PHASES)
    before = around.optimizer.state_dict()
    squares = [before["state"][i]["exp_avg_sq"].clone() for i in range(3)]
    interrupted(around)
    around.optimizer.param_groups[0]["lr"] = 0.5  # a scheduler's
    saved = around.optimizer.state_dict()
    assert [group["betas"] for group in saved["param_groups"]] == [(0.9, 0.999)]
    assert saved["param_groups"][0]["lr"] == 0.5
    for i, square in enumerate(squares):
        assert torch.equal(saved["state"][i]["exp_avg_sq"], square)
    around.step()
    assert len(around.optimizer.param_groups) == 1


def test_hooks_of_the_user_see_and_save_their_own_beta1_and_the_real_moments():
    around = Around(AdamW, max_beta1=0.3, staleness_correction=True)
    saved = []

    def save(optimizer, *_):
        state = optimizer.state_dict()
        square = state["state"][0]["exp_avg_sq"].clone()
        saved.append((len(state["param_groups"]), state["param_groups"][0]["betas"], square))

    around.optimizer.register_step_post_hook(save)
    around.attach()
    around.optimizer.register_step_post_hook(save)
    around.attach([])  # a handle that came last
    for phase in PHASES:
        around.step(phase)
        now = around.optimizer.state[around.sparse[0]]["exp_avg_sq"]
        for num, betas, square in saved[-2:]:
            assert (num, betas) == (1, (0.9, 0.999))
            assert torch.equal(square, now)


def test_a_pre_hook_that_came_later_is_obeyed_from_its_second_step_on():
    """A clip in a pre-hook must be what the moments are corrected by."""
    around = Around(AdamW, staleness_correction=True)
    around.attach()
    order = []
    around.run("dense", "dense")
    around.optimizer.register_step_pre_hook(lambda *_: order.append("user"))
    take_late = kernels.correct_second_moments_
    kernels.correct_second_moments_ = lambda *args: order.append("ours") or take_late(*args)
    try:
        around.run("dense", "sparse", "sparse")
    finally:
        kernels.correct_second_moments_ = take_late
    assert order == ["user", "user", "ours", "user", "ours"]


def test_a_step_that_calls_its_parents_is_one_step_and_may_count_in_its_group():
    """The hooks run for both."""
    settings = {"staleness_correction": True, "max_beta1": 0.3}
    around, plain = Around(FusedAdam, **settings), Around(AdamW, **settings)
    for each in (around, plain):
        each.attach()
    for ours, theirs in zip(around.run(*PHASES), plain.run(*PHASES), strict=True):
        assert torch.equal(ours, theirs)
    assert around.optimizer.param_groups[0]["step"] == 5


def test_what_has_no_first_moment_keeps_its_beta1():
    found = []
    for beta1 in (0.3, None):
        around = Around(lambda p: AdamWScheduleFree(p, **BETAS, eps=1e-8), max_beta1=beta1)
        around.attach()
        found.append(around.run(*PHASES))
        assert around.optimizer.param_groups[0]["k"] == 5
    torch.testing.assert_close(*found, rtol=0, atol=0)


# -- second moments that are not Adam's ---------------------------------------------------------


@pytest.mark.parametrize("kind", [Prodigy, PagedAdam, Lion])
def test_what_cannot_be_corrected_is_left_alone_and_said_once(kind):
    def make(p):
        return kind(p, **BETAS, eps=1e-8)

    around, plain = Around(make, staleness_correction=True), Around(make)
    moments = around.attach()
    with logged() as lines:
        ours = around.run(*PHASES)
    for mine, theirs in zip(ours, plain.run(*PHASES), strict=True):
        assert torch.equal(mine, theirs)
    (said,) = [text for level, text in lines if level == "WARNING"]
    assert said.startswith(f"{kind.__name__}: its second moments cannot be corrected")
    assert (moments.state_dict()["p0"] == -2).all()  # nothing is known of arrivals


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["free", "kin", "l2"])
def test_a_kin_of_adam_is_corrected_after_one_step_that_shows_its_rule(kind, dtype):
    make = {
        "free": lambda p: AdamWScheduleFree(p, **BETAS, eps=1e-8),
        "kin": lambda p: FusedAdam(p, amsgrad=True),
        "l2": lambda p: AdamL2(p, weight_decay=1e-3),
    }[kind]
    around, plain = Around(make, dtype=dtype, staleness_correction=True), Around(make, dtype=dtype)
    moments = around.attach()
    with logged() as lines:
        around.run(*PHASES)
    plain.run(*PHASES)
    assert lines == []
    squares = [each.optimizer.state[each.sparse[0]]["exp_avg_sq"] for each in (around, plain)]
    assert (squares[0] <= squares[1]).all() and (squares[0] < squares[1]).any()
    assert moments.state_dict()["p0"].max() == 4


@pytest.mark.parametrize("stop", [2, 3, 4])
@pytest.mark.parametrize("kind", [FusedAdam, Prodigy])
def test_a_resumed_run_of_another_class_has_the_same_bits(kind, stop):
    def make(p):
        return kind(p, betas=(0.9, 0.99), eps=1e-8)

    straight = Around(make, staleness_correction=True)
    straight.attach()
    first = Around(make, staleness_correction=True)
    before = first.attach()
    first.run(*PHASES[:stop])
    again = Around(make, staleness_correction=True)
    after = again.attach()
    for new, old in zip((*again.sparse, *again.dense), (*first.sparse, *first.dense), strict=True):
        new.data.copy_(old.data)
    again.optimizer.load_state_dict(first.optimizer.state_dict())
    after.load_state_dict(before.state_dict())
    again.stats = first.stats
    for ours, theirs in zip(again.run(*PHASES[stop:]), straight.run(*PHASES), strict=True):
        assert torch.equal(ours, theirs)


# -- waits for the device -----------------------------------------------------------------------


class Waits(TorchDispatchMode):
    """Counts operations for which the host would wait for a GPU."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        waiting = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim")
        self.num += name in waiting or bool(masks)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("more", [{}, {"amsgrad": True}, {"fused": True}])
def test_the_host_waits_as_often_for_many_parameters_as_for_one(monkeypatch, more):
    monkeypatch.setattr(kernels, "backend_for", lambda _: reference)  # what runs on CUDA
    tolist, copied = torch.Tensor.tolist, []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: copied.append(x) or tolist(x))
    waits = {}
    for num in (1, 12):
        around = Around(
            lambda p: AdamW(p, **more), [(3, 4)] * num, staleness_correction=True, max_beta1=0.3
        )
        moments = around.attach()
        around.run(*PHASES)
        if more.get("fused"):
            around.optimizer.grad_scale = torch.tensor(2.0)
            around.optimizer.found_inf = torch.tensor(0.0)
        around.exchange()
        copied.clear()
        with Waits() as counted:
            moments._hooks._before(around.optimizer)
            moments._hooks._after(around.optimizer)
        waits[num] = counted.num + len(copied)
    assert waits == {1: 2, 12: 2}


def test_a_step_that_a_fused_optimizer_skips_for_its_scaler_changes_nothing():
    around = Around(lambda p: AdamW(p, fused=True), staleness_correction=True)
    moments = around.attach()
    around.run(*PHASES)
    square = around.optimizer.state[around.sparse[0]]["exp_avg_sq"]
    before, arrived = square.clone(), moments.state_dict()["p0"]
    around.optimizer.found_inf = torch.tensor(1.0)
    around.step()
    assert torch.equal(square, before)
    assert torch.equal(moments.state_dict()["p0"], arrived)
