# SPDX-License-Identifier: Apache-2.0
"""Float buffers: averaged by local steps, put back after a step that no rank applied, and saved."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk import simulate
from oktopk.errors import StateError
from sites import mesh_of

WIDTH, EVERY = 48, 4
LOCAL = {"every": EVERY, "density": 0.1, "check_every": 2, "verbose": False}
STATISTICS = ("norm.running_mean", "norm.running_var", "mean")
NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    """Statistics in a norm and of its own, masks, a counter, and a cache that is not saved."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(20, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(7, dtype=dtype))
        self.register_buffer("mask", torch.tensor([0.0, -INF, INF]))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            moved = self.mean.float() * 0.9 + x.detach()[0, :7] * 0.1
            self.mean = moved.to(self.mean.dtype)  # another tensor, as people write it
            self.cache += x.detach()[0, :3]
        return self.last(torch.relu(self.norm(x)))


def start(comm, **more) -> tuple[Net, torch.optim.Optimizer, oktopk.LocalSteps]:
    torch.manual_seed(comm.rank)
    net = Net(more.pop("dtype", torch.float32))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return net, optimizer, oktopk.local_steps(net, optimizer, comm=comm, **(LOCAL | more))


def backward(net: nn.Module, rank: int, step: int, factor: float = 1.0) -> None:
    g = torch.Generator().manual_seed(100 * rank + step)
    net(factor * torch.randn(8, 20, generator=g) + rank).square().mean().backward()


def train(net, optimizer, rank: int, steps: range, factor: float = 1.0) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(net, rank, step, factor)
        optimizer.step()


def statistics(net: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in net.named_buffers() if name in STATISTICS}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Local steps.


def one_round(comm, **more) -> tuple:
    net, optimizer, handle = start(comm, **more)
    train(net, optimizer, comm.rank, range(EVERY - 1))
    optimizer.zero_grad()
    backward(net, comm.rank, EVERY - 1)
    own = statistics(net)
    optimizer.step()
    return own, statistics(net), net, handle


@pytest.mark.parametrize("method", ["auto", "oktopk", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("P", [1, 2, 3])
def test_an_exchange_averages_float_buffers_in_rank_order(P, dtype, method):
    ranks = simulate(P, partial(one_round, dtype=dtype, method=method))
    own = [before for before, *_ in ranks]
    sums_in = torch.float64 if dtype == torch.float64 else torch.float32
    for name in STATISTICS:
        total = own[0][name].to(sums_in)
        for each in own[1:]:
            total = total + each[name].to(sums_in)
        mean = (total / P).to(own[0][name].dtype)
        assert all(torch.equal(after[name], mean) for _, after, *_ in ranks)
    assert P == 1 or not same(own[0], own[1])
    for _, _, net, _ in ranks:
        assert net.norm.num_batches_tracked == EVERY
        assert net.mask.tolist() == [0.0, -INF, INF]
    assert P == 1 or not torch.equal(ranks[0][2].cache, ranks[1][2].cache)


def test_what_buffers_send_is_in_the_ledger_and_only_what_has_changed():
    P, numel, num = 2, 2 * WIDTH + 7, 4
    for _, _, _, handle in simulate(P, one_round):
        stage = handle.stats.stages["buffers"]
        share = -(-numel // P)
        assert stage.payload_sent == 2 * 4 * share * (P - 1)
        assert stage.header_sent == 2 * 4 * -(-num // P) * (P - 1)


def test_a_model_without_float_buffers_sends_nothing_for_them():
    def stages(comm) -> set[str]:
        net = nn.Linear(20, WIDTH)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        handle = oktopk.local_steps(net, optimizer, comm=comm, **LOCAL)
        train(net, optimizer, comm.rank, range(EVERY))
        return set(handle.stats.stages)

    assert all("buffers" not in each for each in simulate(2, stages))


def with_a_nan(comm, where: str, **more) -> tuple:
    """The first exchange is well; in the second round rank 1 has a NaN, in the third it is gone."""
    net, optimizer, handle = start(comm, **more)
    train(net, optimizer, comm.rank, range(EVERY))
    delay = more.get("delay", 0)
    train(net, optimizer, comm.rank, range(EVERY, EVERY + delay))
    well = [statistics(net), copy.deepcopy(handle.state_dict())]
    if comm.rank == 1 and where == "buffers":
        net.norm.running_mean[3] = NAN
    factor = NAN if comm.rank == 1 and where == "batch" else 1.0
    train(net, optimizer, comm.rank, range(EVERY + delay, 2 * EVERY), factor)
    train(net, optimizer, comm.rank, range(2 * EVERY, 2 * EVERY + delay))
    skipped = handle.skipped_steps
    after = statistics(net)
    train(net, optimizer, comm.rank, range(2 * EVERY + delay, 3 * EVERY + delay))
    return well, after, skipped, statistics(net), net


def test_a_nan_on_one_rank_brings_the_buffers_of_all_back():
    ranks = simulate(3, partial(with_a_nan, where="batch"))
    for (well, _), after, skipped, later, net in ranks:
        assert skipped == 1
        assert same(well, after) and same(later, ranks[0][3])
        assert all(torch.isfinite(x).all() for x in (*later.values(), *net.parameters()))


def test_a_nan_in_a_buffer_alone_is_set_back_and_the_weights_are_exchanged(caplog):
    ranks = simulate(3, partial(with_a_nan, where="buffers"))
    assert "rank 1, exchange 1: the buffers norm.running_mean of this rank" in caplog.text
    for (well, _), after, skipped, later, _ in ranks:
        assert skipped == 0 and same(after, ranks[0][1]) and same(later, ranks[0][3])
        kept = after["norm.running_mean"] == well["norm.running_mean"]
        assert kept[3] and not kept[:3].any()
        assert all(torch.isfinite(x).all() for x in later.values())


@pytest.mark.parametrize("how", [{"delay": 2}, {"fragments": 2}, {"delay": 1, "fragments": 2}])
def test_streaming_averages_buffers_and_brings_them_back(how):
    ranks = simulate(2, partial(with_a_nan, where="batch", **how))
    for _, _, skipped, later, net in ranks:
        assert skipped >= 1
        assert all(torch.isfinite(x).all() for x in (*later.values(), *net.parameters()))
    asked = simulate(2, partial(asked_for, **how))
    assert same(*asked)


def asked_for(comm, **how) -> dict[str, Tensor]:
    net, optimizer, handle = start(comm, **how)
    train(net, optimizer, comm.rank, range(EVERY + 1))
    handle.exchange()
    return statistics(net)


def delayed(comm) -> tuple:
    net, optimizer, _ = start(comm, delay=2)
    train(net, optimizer, comm.rank, range(EVERY - 1))
    optimizer.zero_grad()
    backward(net, comm.rank, EVERY - 1)
    launched = statistics(net)
    optimizer.step()
    train(net, optimizer, comm.rank, range(EVERY, EVERY + 2))
    return launched, statistics(net)


def test_with_a_delay_the_means_of_the_launch_land():
    (one, landed), (other, landed_too) = simulate(2, delayed)
    assert same(landed, landed_too)
    assert same(landed, {name: (one[name] + other[name]) / 2 for name in one})


def other_shape(comm) -> tuple:
    net, optimizer, _ = start(comm)
    train(net, optimizer, comm.rank, range(EVERY - 1))
    if comm.rank == 1:
        net.norm.running_var = torch.ones(1).expand(WIDTH).clone()[: WIDTH - 1]
        net.norm.eval()
        net.norm.running_mean = net.norm.running_mean[: WIDTH - 1]
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return net.norm.running_mean, net.mean


def test_a_buffer_of_another_shape_on_one_rank_is_left_alone_on_all():
    (one, mean), (other, same_mean) = simulate(2, other_shape)
    assert one.shape == (WIDTH,) and other.shape == (WIDTH - 1,)
    assert torch.equal(mean, same_mean)


# Local steps: states.


def resumed(comm, stop: int, how: dict) -> tuple:
    """A run that never stopped, and one that did: buffers and states at the end."""
    end = 3 * EVERY
    whole = start(comm, **how)
    train(*whole[:2], comm.rank, range(end))
    whole[2].close()
    first = start(comm, **how)
    train(*first[:2], comm.rank, range(stop))
    state, optimizer = first[2].state_dict(), first[1].state_dict()
    first[2].close()
    second = start(comm, **how)
    second[1].load_state_dict(optimizer)
    second[2].load_state_dict(state)
    train(*second[:2], comm.rank, range(stop, end))
    return statistics(whole[0]), statistics(second[0])


@pytest.mark.parametrize("how", [{}, {"delay": 2}, {"delay": 1, "fragments": 2}])
def test_a_resumed_run_has_the_same_buffers(how):
    for stop in range(1, 2 * EVERY + 2):
        for whole, again in simulate(2, partial(resumed, stop=stop, how=how)):
            assert same(whole, again)


def states_of(comm, steps: int, **how) -> dict:
    net, optimizer, handle = start(comm, **how)
    train(net, optimizer, comm.rank, range(steps))
    return handle.state_dict()


def loaded(comm, state) -> tuple:
    net, optimizer, handle = start(comm)
    before = statistics(net)
    handle.load_state_dict(state[comm.rank] if isinstance(state, tuple) else state)
    after = statistics(net)
    train(net, optimizer, comm.rank, range(2 * EVERY))
    return before, after, statistics(net)


def test_a_state_without_buffers_is_read_and_leaves_them():
    states = simulate(2, partial(states_of, steps=EVERY + 1))
    for state in states:
        del state["buffers"], state["buffer_anchor"]
    ranks = simulate(2, partial(loaded, state=tuple(states)))
    assert all(same(before, after) for before, after, _ in ranks)
    assert all(torch.isfinite(x).all() for _, _, later in ranks for x in later.values())


@pytest.mark.parametrize("P", [1, 3])
def test_another_number_of_ranks_takes_over_buffers(P):
    states = simulate(2, partial(states_of, steps=EVERY + 1))
    ranks = simulate(P, partial(loaded, state=states))
    for rank, (_, after, _) in enumerate(ranks):
        old = states[rank]["buffers"] if rank < 2 else states[0]["buffer_anchor"]
        assert same(after, {name: old[name] for name in after})


def test_a_buffer_of_another_shape_in_a_state_is_refused():
    (state,) = simulate(1, partial(states_of, steps=1))
    state["buffers"]["mean"] = torch.zeros(9)
    said = r"rank 0: buffer 'mean' has the shape \(9,\) in the state and \(7,\) here"
    with pytest.raises(StateError, match=said):
        simulate(1, partial(loaded, state=state))


# Gradients: a step that no rank applied has not changed buffers either.


def skipped_by_ddp(group, accumulate: int, ddp: dict, how: dict) -> tuple:
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = oktopk.attach(model, warmup_steps=2, density=0.1, verbose=False, **how)
    seen = []
    for step in range(6):
        seen.append(statistics(model.module))
        bad = step == 3 and rank == 0
        optimizer.zero_grad()
        with model.no_sync():
            for part in range(accumulate - 1):
                backward(model, rank, 10 * step + part, NAN if bad else 1.0)
        backward(model, rank, 10 * step + 9, NAN if bad and accumulate == 1 else 1.0)
        seen.append(statistics(model.module))
        if not handle.stats.skipped:
            optimizer.step()
        with torch.no_grad():  # an evaluation changes nothing, and is no part of a step
            model.eval()
            model(torch.ones(2, 20))
            model.train()
    skipped = handle.skipped_steps
    handle.close()
    hooks = len(model._forward_pre_hooks)
    return seen, skipped, hooks


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("on_nonfinite", ["skip", "deliver"])
def test_a_skipped_step_of_ddp_brings_buffers_back(worlds, accumulate, broadcast, on_nonfinite):
    ddp, how = {"broadcast_buffers": broadcast}, {"on_nonfinite": on_nonfinite}
    for seen, skipped, hooks in worlds.run(2, skipped_by_ddp, accumulate, ddp, how):
        assert (skipped, hooks) == (1, 0)
        assert [same(*seen[2 * step : 2 * step + 2]) for step in range(6)] == [
            step == 3 for step in range(6)
        ]
        assert all(torch.isfinite(x).all() for each in seen for x in each.values())


# FSDP2.


def sharded_net(replicas: int) -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(Net(), mesh=mesh_of(replicas)["shard"])


def skipped_by_fsdp(group) -> tuple:
    rank, model = dist.get_rank(), sharded_net(2)
    handle = oktopk.attach_fsdp(
        model, mesh_of(2)["replicate"], warmup_steps=1, density=0.1, verbose=False
    )
    seen = []
    for step in range(3):
        before = statistics(model)
        model.zero_grad()
        backward(model, rank, step, NAN if step == 1 and rank == 3 else 1.0)
        seen.append(same(before, statistics(model)))
    handle.close()
    return seen, len(model._forward_pre_hooks)


def test_a_skipped_step_of_fsdp_brings_buffers_back(worlds):
    ranks = worlds.run(4, skipped_by_fsdp)
    assert [seen for seen, _ in ranks] == [[False, True, False]] * 4
    assert len({hooks for _, hooks in ranks}) == 1


def rounds_of_fsdp(group, delay: int) -> tuple:
    rank, model = dist.get_rank(), sharded_net(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    across = mesh_of(2)["replicate"].get_group()
    handle = oktopk.local_steps(model, optimizer, group=across, delay=delay, **LOCAL)
    train(model, optimizer, rank, range(EVERY))
    train(model, optimizer, rank, range(EVERY, EVERY + delay))
    after = statistics(model)
    train(model, optimizer, rank, range(EVERY + delay, 2 * EVERY), NAN if rank == 2 else 1.0)
    train(model, optimizer, rank, range(2 * EVERY, 2 * EVERY + delay))
    later, skipped = statistics(model), handle.skipped_steps
    handle.close()
    return after, later, skipped


@pytest.mark.parametrize("delay", [0, 1])
def test_all_ranks_of_all_sites_have_the_same_buffers_after_an_exchange(worlds, delay):
    ranks = worlds.run(4, rounds_of_fsdp, delay)
    for after, later, skipped in ranks:
        assert skipped == 1
        assert same(after, ranks[0][0]) and same(later, after)
