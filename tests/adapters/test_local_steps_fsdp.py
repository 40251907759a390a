# SPDX-License-Identifier: Apache-2.0
"""FSDP2 inside a site, local steps between sites: two sites of two ranks."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import oktopk
from oktopk.settings import num_kept
from rounds import same, same_state
from sites import ALL_SPARSE, CLASSES, Net, Site, batch, mesh_of, one_step, shard, shards_of, whole

LOCAL = {"every": 3, "density": 0.1, "outer_momentum": 0.5, "outer_lr": 0.7, "check_every": 1}
STREAMING = {"delay": 1, "fragments": 2}


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sharded(model: nn.Module, sites: int = 2, **how) -> nn.Module:
    shards = mesh_of(sites)["shard"]
    fully = shard if isinstance(model, Net) else fully_shard
    return fully(model, mesh=shards, **how)


def start(make=Net, sites: int = 2, optimizer=adamw, fsdp=None, **more) -> Site:
    """A model that is sharded inside `sites` sites, with local steps between them."""
    torch.manual_seed(dist.get_rank() // mesh_of(sites)["shard"].size())  # another at each site
    model = sharded(make(), sites, **(fsdp or {}))
    site = Site(model, optimizer(model.parameters()))
    how = {"group": mesh_of(sites)["replicate"], "on_step": site.stats.append}
    site.handle = oktopk.local_steps(model, site.optimizer, **(how | LOCAL | more))
    return site


def over_sites(answers: list) -> list[tuple]:
    """For each shard, the answers of the two ranks that have it."""
    return list(zip(answers[:2], answers[2:], strict=True))


# What an exchange leads to.


def rounds(group, steps: int, how: dict) -> tuple:
    """The shards after every step, the statistics, what arrives inside and what goes across."""
    site, seen = start(**how), []
    sent = site.handle.traffic["replicate"].sent
    for step in range(steps):
        one_step(site, step)
        seen.append(shards_of(site.model))
    numel = site.handle.driver.parameters.num_sparse, site.handle.driver.engine.buckets.num_dense
    traffic = site.handle.traffic
    handshake = site.handle.comm.ledger.stages["handshake"].sent
    site.handle.close()
    return seen, site.stats, numel, traffic["replicate"].sent - sent - handshake, traffic["shard"]


@pytest.mark.parametrize("method", ["auto", "oktopk", "dense"])
def test_equal_shards_have_equal_weights_after_every_exchange(worlds, method):
    answers = worlds.run(4, rounds, 9, {"method": method})
    for (one, *_), (other, *_) in over_sites(answers):
        assert [same(*both) for both in zip(one, other, strict=True)] == [False, False, True] * 3
    for _, stats, (_, num_dense), sent, inside in answers:
        assert sum(each.bytes_sent for each in stats) == sent
        assert inside.payload_sent == 0 and inside.header_sent > 0
        assert method == "dense" or all(each.k > num_dense for each in stats)
    if method == "auto":  # k is of the whole model, and the sites share it
        for site in (answers[:2], answers[2:]):
            sparse, dense = (sum(numel[i] for _, _, numel, *_ in site) for i in range(2))
            for exchange in range(3):
                kept = sum(stats[exchange].k for _, stats, *_ in site)
                assert kept == num_kept(sparse, 0.1 / 2) + dense


def in_float64(group, sites: int, more: dict | None) -> dict:
    """The whole weights after six steps at density 1; None is FSDP2 alone."""
    torch.manual_seed(0)
    model = sharded(Net().double(), sites)
    site = Site(model, adamw(model.parameters()))
    if more is not None:
        group = mesh_of(sites)["replicate"].get_group()
        how = {"group": group, "every": 2, "density": 1.0} | more
        site.handle = oktopk.local_steps(model, site.optimizer, **how)
    for step in range(6):
        one_step(site, step)
    if site.handle is not None:
        assert site.handle.step == 3
        site.handle.close()
    return whole(model)


def assert_close(mine: dict, other: dict) -> None:
    for name, weight in mine.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-9, atol=1e-11)


def test_one_site_is_fsdp2_alone(worlds):
    ours, alone = (worlds.run(4, in_float64, 1, more) for more in ({}, None))
    for one, other in zip(ours, alone, strict=True):
        assert_close(one, other)


def diloco(lr: float, momentum: float) -> dict:
    """Two workers, each with the batches of both ranks of a site."""
    torch.manual_seed(0)
    outer = Net().double()
    buffers = [torch.zeros_like(p) for p in outer.parameters()]
    nets = [copy.deepcopy(outer) for _ in range(2)]
    optimizers = [adamw(net.parameters()) for net in nets]
    for step in range(6):
        for site, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            halves = [batch(2 * site + rank, step) for rank in range(2)]
            x, y = (torch.cat(parts) for parts in zip(*halves, strict=True))
            optimizer.zero_grad()
            cross_entropy(net(x.double()), y).backward()
            optimizer.step()
        if step % 2:
            every_net = (net.parameters() for net in (outer, *nets))
            for buffer, p, *theirs in zip(buffers, *every_net, strict=True):
                grad = sum(p.detach() - each.detach() for each in theirs) / 2
                buffer.copy_(momentum * buffer + grad)
                p.detach().copy_(p.detach() - lr * (grad + momentum * buffer))
            for net in nets:
                net.load_state_dict(outer.state_dict())
    return {name: p.detach() for name, p in outer.named_parameters()}


def test_density_one_is_diloco_between_sites(worlds):
    reference = diloco(lr=0.7, momentum=0.9)
    for weights in worlds.run(4, in_float64, 2, {"outer_lr": 0.7, "outer_momentum": 0.9}):
        assert_close(weights, reference)


BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


def under_policies(group, fsdp: dict) -> tuple:
    site = start(fsdp=fsdp, outer_momentum=0.0)
    for step in range(6):
        one_step(site, step)
    site.handle.close()
    moments = [x for state in site.optimizer.state.values() for x in state.values() if x.ndim]
    return shards_of(site.model), {type(x).__name__ for x in moments}


@pytest.mark.parametrize("fsdp", [BF16, OFFLOADED], ids=["mixed precision", "CPU offload"])
def test_policies_of_fsdp_and_the_optimizer_are_left_alone(worlds, fsdp):
    for (one, kinds), (other, _) in over_sites(worlds.run(4, under_policies, fsdp)):
        assert same(one, other) and kinds == {"DTensor"}
        assert {x.dtype for x in one.values()} == {torch.float32}


def after_an_evaluation(group) -> tuple[Tensor, Tensor]:
    """Predictions right after an exchange that follows a forward, by the model and by a copy."""
    site = start()
    one_step(site, 0)
    x, _ = batch(0, 99)
    with torch.no_grad():
        site.model(x)  # FSDP keeps the root whole now
        site.handle.exchange()
        mine = site.model(x)
        site.model.reshard()
        plain = Net()
        plain.load_state_dict(whole(site.model))
    site.handle.close()
    return mine, plain(x).detach()


def test_an_exchange_after_an_evaluation_is_seen_by_the_next_forward(worlds):
    for predictions, expected in worlds.run(4, after_an_evaluation):
        torch.testing.assert_close(predictions, expected)


# Shards of no entries.


def one_row() -> nn.Module:
    """The second rank of a site has nothing of it."""
    return nn.Linear(20, 1)


def one_row_at_last() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 1))


def with_empty_shards(group, make, density: float) -> tuple:
    site = start(make, density=density, policy=ALL_SPARSE)
    for step in range(6):
        x, _ = batch(dist.get_rank(), step)
        site.model(x).square().mean().backward()
        site.optimizer.step()
        site.optimizer.zero_grad()
    state = site.handle.state_dict()
    site.handle.load_state_dict(state)
    again = same_state(state, site.handle.state_dict())
    sizes = [x.numel() for x in shards_of(site.model).values()]
    site.handle.close()
    return shards_of(site.model), sizes, again


@pytest.mark.parametrize("density", [0.1, 1.0])
@pytest.mark.parametrize("make", [one_row, one_row_at_last])
def test_a_rank_may_have_nothing_of_a_parameter(worlds, make, density):
    answers = worlds.run(4, with_empty_shards, make, density)
    for (one, _, again), (other, *_) in over_sites(answers):
        assert same(one, other) and again
        assert all(x.isfinite().all() for x in one.values())
    assert any(size == 0 for size in answers[1][1])


# A NaN on one rank.


def with_a_nan(group, how: dict, when: int = 5) -> tuple:
    """Four rounds; in one step, one entry of the shard of rank 3 becomes a NaN."""
    site, seen, raised = start(optimizer=sgd, **how), [], 0
    for step in range(12):
        x, y = batch(dist.get_rank(), step)
        cross_entropy(site.model(x), y).backward()
        if step == when and dist.get_rank() == 3:  # a later forward would spread it inside the site
            site.model.blocks[0].inner.weight.grad._local_tensor[3, 5] = float("nan")
        try:
            site.optimizer.step()
        except oktopk.NonfiniteError:
            raised += 1
        site.optimizer.zero_grad()
        seen.append(shards_of(site.model))
    skipped = [stats.skipped for stats in site.stats]
    site.handle.close()
    return seen, skipped, raised


@pytest.mark.parametrize(
    "how", [{"on_nonfinite": "skip"}, {"on_nonfinite": "raise"}, {"density": 1.0}], ids=str
)
def test_a_nan_in_one_shard_rolls_the_round_back_on_all_ranks(worlds, how):
    answers = worlds.run(4, with_a_nan, how)
    for seen, skipped, raised in answers:
        assert skipped == [False, True, False, False]
        assert raised == (how.get("on_nonfinite") == "raise")
        assert same(seen[5], seen[2]) and not same(seen[4], seen[2])
        assert all(x.isfinite().all() for x in seen[11].values())
    for (one, *_), (other, *_) in over_sites(answers):
        assert same(one[11], other[11]) and not same(one[11], one[5])


def test_a_nan_in_one_shard_is_found_by_all_ranks_while_streaming(worlds):
    """In the step that launches the exchange of its fragment: later it is in all shards."""
    answers = worlds.run(4, with_a_nan, STREAMING, 6)
    for seen, skipped, _ in answers:
        assert skipped == answers[0][1] and sum(skipped) == 1
        assert all(x.isfinite().all() for x in seen[11].values())


# States.


def straight_and_resumed(group, at: int, how: dict) -> tuple:
    """States of a run of eight steps, and of one that was stopped and resumed after `at` steps."""
    ends, file = [], io.BytesIO()
    for resumed in (False, True):
        site = start(**how)
        if resumed:
            file.seek(0)
            for part, state in zip((site.optimizer, site.handle), torch.load(file), strict=True):
                part.load_state_dict(state)
        for step in range(at if resumed else 0, 8):
            if step == at and not resumed:
                torch.save([site.optimizer.state_dict(), site.handle.state_dict()], file)
            one_step(site, step)
        ends.append((shards_of(site.model), site.handle.state_dict()))
        site.handle.close()
    return tuple(ends)


@pytest.mark.parametrize(
    ("at", "how"), [(3, {}), (4, {"method": "oktopk"}), (4, STREAMING)], ids=str
)
def test_a_resumed_run_has_the_same_bits(worlds, at, how):
    for (weights, state), (again, its) in worlds.run(4, straight_and_resumed, at, how):
        assert same(weights, again) and same_state(state, its)


def saved_in_a_folder(group, folder: str) -> tuple:
    """A state from a folder; then of other meshes, and gathered: what is said of them."""
    site = start(optimizer=sgd)
    for step in range(4):
        one_step(site, step)
    site.handle.save(folder)
    state, weights = site.handle.state_dict(), shards_of(site.model)
    one_step(site, 4)
    site.handle.load(folder)
    assert same(weights, shards_of(site.model)) and same_state(state, site.handle.state_dict())
    said = [_said(site.handle.gathered_state_dict)]
    said.append(_said(site.handle.load_state_dict, [state] * 4))
    site.handle.close()
    for sites in (1, 4):
        other = start(sites=sites)
        said.append(_said(other.handle.load_state_dict, state))
        other.handle.close()
    return said


def _said(act, *args) -> str:
    try:
        act(*args)
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing"


def test_states_by_rank_and_no_others(worlds, tmp_path):
    for gathered, listed, one_site, four_sites in worlds.run(4, saved_in_a_folder, str(tmp_path)):
        assert "let every rank save its own" in gathered
        assert "each rank loads its own state" in listed
        assert "of 2 sites of 2 ranks, and these are 1 of 4" in one_site
        assert "of 2 sites of 2 ranks, and these are 4 of 1" in four_sites


# What cannot work.


def a_mesh_of_two() -> None:
    model = shard(Net(), mesh_of(2))
    oktopk.local_steps(model, adamw(model.parameters()))


def ignored_parameters() -> None:
    model = Net()
    fully_shard(model, mesh=mesh_of(2)["shard"], ignored_params={model.head.weight})
    oktopk.local_steps(model, adamw(model.parameters()), group=mesh_of(2)["replicate"].get_group())


def tensor_parallelism() -> None:
    model = nn.Sequential(nn.Linear(20, CLASSES + 1))
    parallelize_module(model, mesh_of(2)["shard"], {"0": ColwiseParallel()})
    oktopk.local_steps(model, adamw(model.parameters()), group=mesh_of(2)["replicate"].get_group())


def an_early_optimizer() -> None:
    model = Net()
    optimizer = adamw(model.parameters())
    shard(model, mesh_of(2)["shard"])
    oktopk.local_steps(model, optimizer, group=mesh_of(2)["replicate"].get_group())


REFUSED = {
    "automatic density": (lambda: start(density="auto"), "'auto' does not work with FSDP2"),
    "no group": (lambda: start(group=None), 'group=mesh["replicate"])'),
    "the shard group": (
        lambda: start(group=mesh_of(2)["shard"].get_group()),
        "exactly this rank in common",
    ),
    "a communicator": (lambda: start(comm=oktopk.simulate(1, lambda c: c)[0]), "pass group"),
    "a mesh of two dimensions": (a_mesh_of_two, "shard over a mesh of one dimension"),
    "ignored parameters": (ignored_parameters, "'head.weight' is not sharded by FSDP"),
    "tensor parallelism": (tensor_parallelism, "fully_shard has not made"),
    "an early optimizer": (an_early_optimizer, "moved to its device, or sharded"),
}


def refusals(group) -> dict[str, str]:
    return {name: _said(act) for name, (act, _) in REFUSED.items()}


def test_what_cannot_work_is_refused(worlds):
    for said in worlds.run(4, refusals):
        for name, (_, text) in REFUSED.items():
            assert text in said[name], (name, said[name])


# Weights that are loaded later.


def after_a_load(group, how: dict, full: bool, alone: bool) -> tuple[str, float]:
    """How far the shards are from what was loaded, after rounds in which the optimizer rests."""
    site = start(fsdp=how.get("fsdp"), **how.get("more", {}))
    for step in range(4):
        one_step(site, step)
    g = torch.Generator().manual_seed(3)
    weights = {n: torch.randn(p.shape, generator=g) for n, p in site.model.named_parameters()}
    if dist.get_rank() < 2 or not alone:
        if full:
            set_model_state_dict(
                site.model, weights, options=StateDictOptions(full_state_dict=True)
            )
        else:
            site.model.load_state_dict(
                {
                    n: distribute_tensor(weights[n], p.device_mesh, p.placements)
                    for n, p in site.model.state_dict().items()
                }
            )
    loaded, said = shards_of(site.model), ""
    site.optimizer.param_groups[0]["lr"] = 0.0
    try:
        for step in range(4, 12):
            one_step(site, step)
    except (ValueError, oktopk.ExchangeError) as error:
        said = str(error)
    after = shards_of(site.model)
    dist.barrier(group)
    site.handle.close()
    away = max(float((after[n] - loaded[n]).abs().max()) for n in after if after[n].numel())
    return said, away


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    "how", [{}, {"more": STREAMING}, {"fsdp": {"reshard_after_forward": False}}]
)
def test_loaded_weights_are_a_new_start(worlds, how, full):
    assert worlds.run(4, after_a_load, how, full, False) == [("", 0.0)] * 4


def test_weights_that_one_site_loads_are_an_error_on_all_ranks(worlds):
    for rank, (said, _) in enumerate(worlds.run(4, after_a_load, {}, False, True)):
        assert "not the same on all ranks" in said
        assert f"rank {rank % 2} loaded weights into " in said, "that of the first site"
