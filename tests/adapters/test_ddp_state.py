# SPDX-License-Identifier: Apache-2.0
"""What a handle saves and loads, and what residuals follow: scales and rates."""

from __future__ import annotations

import io
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import IDIOMS, SPARSE, Net, batch, build, one_step, train, weights_of


def resumed_at(group, name: str, stop: int, steps: int) -> tuple:
    """Weights of a run without and of one with a stop, saved and loaded safely."""
    rank, idiom = torch.distributed.get_rank(group), IDIOMS[name]
    straight = train(group, name, steps, SPARSE)[0]
    parts = build(group, idiom, 0, SPARSE)
    for step in range(stop):
        one_step(*parts[:3], idiom, rank, step)
    buffer = io.BytesIO()
    model, _, optimizer, handle = parts
    torch.save([model.state_dict(), optimizer.state_dict(), handle.state_dict()], buffer)
    handle.close()
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    model, called, optimizer, handle = build(group, idiom, 1, SPARSE)
    for what, state in zip((model, optimizer, handle), saved, strict=True):
        what.load_state_dict(state)
    for step in range(stop, steps):
        one_step(model, called, optimizer, idiom, rank, step)
    handle.close()
    return straight, weights_of(model)


def checkpointed(group, folder: str) -> tuple:
    """As resumed_at, through torch.distributed.checkpoint into a fresh handle's state."""
    rank = torch.distributed.get_rank(group)
    straight = train(group, "plain", 12, SPARSE)[0]
    model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, SPARSE)
    for step in range(7):
        one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
    momentum = optimizer.state_dict()
    saved = {"model": model.state_dict(), f"oktopk.{rank}": handle.state_dict()}
    dcp.save(saved, checkpoint_id=folder, process_group=group)
    handle.close()
    model, called, optimizer, handle = build(group, IDIOMS["plain"], 1, SPARSE)
    template = {"model": model.state_dict(), f"oktopk.{rank}": handle.state_dict()}
    dcp.load(template, checkpoint_id=folder, process_group=group)
    model.load_state_dict(template["model"])
    handle.load_state_dict(template[f"oktopk.{rank}"])
    optimizer.load_state_dict(momentum)
    for step in range(7, 12):
        one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
    handle.close()
    return straight, weights_of(model)


def test_distributed_checkpoint_resumes_with_the_same_bits(worlds, tmp_path):
    for straight, resumed in worlds.run(2, checkpointed, str(tmp_path)):
        for name, value in straight.items():
            assert torch.equal(value, resumed[name]), name


# with 3 ranks the layout of a bucket shows in the bits of a dense sum
@pytest.mark.parametrize(
    ("name", "stop"),
    [
        *(("plain", stop) for stop in (0, 1, 2, 3, 4, 5, 11)),
        *(("static_graph", stop) for stop in (1, 2, 3, 4)),
        ("find_unused_parameters", 1),
        ("gradient_as_bucket_view", 1),
    ],
)
def test_a_resumed_run_has_the_same_bits(worlds, name, stop):
    for straight, resumed in worlds.run(3, resumed_at, name, stop, 16):
        for name, value in straight.items():
            assert torch.equal(value, resumed[name]), name


def hand_over(group, states: list | None) -> dict:
    """Load what another number of ranks saved (or train a little), then save."""
    rank = torch.distributed.get_rank(group)
    parts = build(group, IDIOMS["plain"], 0, SPARSE)
    if states is None:
        for step in range(8):
            one_step(*parts[:3], IDIOMS["plain"], rank, step)
    else:
        parts[3].load_state_dict(states)
    state = parts[3].state_dict()
    if states is not None:
        one_step(*parts[:3], IDIOMS["plain"], rank, 100)
    parts[3].close()
    return state


def owed_by_all(states: list) -> dict:
    return {name: sum(s["residuals"][name] for s in states) for name in states[0]["residuals"]}


def test_another_number_of_ranks_owes_the_same(worlds):
    states = worlds.run(4, hand_over, None)
    assert all(state.keys() == states[0].keys() for state in states)
    for P in (2, 3):
        later = worlds.run(P, hand_over, states)
        torch.testing.assert_close(owed_by_all(later), owed_by_all(states))
        states = later


def load_changed(group, changes: dict) -> str:
    """What is said of a state whose metadata were changed, or that lacks a parameter."""
    _, _, _, handle = build(group, IDIOMS["plain"], 0, SPARSE)
    state = handle.state_dict()
    state["metadata"] = json.dumps(json.loads(state["metadata"]) | changes)
    if not changes:
        del state["residuals"]["head.bias"]
    try:
        handle.load_state_dict(state)
    except ValueError as error:
        return str(error)
    finally:
        torch.distributed.barrier(group)  # one that closes at once breaks the other's connecting
        handle.close()
    return "no error"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 9}, "saved by 9 ranks and there are 2: pass the list of all ranks' states"),
        ({"method": "topka"}, "saved with method='topka' and this is 'oktopk': attach with the"),
        ({}, "the state is of another model; only one of them has ['head.bias']"),
    ],
)
def test_a_state_that_does_not_fit_is_named(worlds, changes, message):
    for rank, said in enumerate(worlds.run(2, load_changed, changes)):
        assert said.startswith(f"rank {rank}: ") and message in said


def load_lists(group) -> tuple[list[str], int]:
    """What is said of lists that are not all ranks' states; then the step of a good one."""
    _, _, _, handle = build(group, IDIOMS["plain"], 0, SPARSE)
    rank0, rank1 = handle.state_dict(), handle.state_dict()
    for rank, state in enumerate((rank0, rank1)):
        state["metadata"] = json.dumps(json.loads(state["metadata"]) | {"rank": rank})
    said = []
    for bad in ([], {}, [rank0, {}], [rank0, rank0], [rank1]):
        try:
            handle.load_state_dict(bad)
        except ValueError as error:
            said.append(str(error))
    handle.load_state_dict([rank1, rank0])
    torch.distributed.barrier(group)  # one that closes at once breaks the other's connecting
    handle.close()
    return said, handle.step


def test_a_list_that_is_not_of_all_ranks_is_named(worlds):
    for rank, (said, step) in enumerate(worlds.run(2, load_lists)):
        messages = [
            "the list of states is empty",
            "not a state of a handle",
            "not a state of a handle",
            "expected the states of all 2 ranks that saved, each once, got those of ranks [0, 0]",
            "expected the states of all 2 ranks that saved, each once, got those of ranks [1]",
        ]
        assert step == 0
        for one, message in zip(said, messages, strict=True):
            assert one.startswith(f"rank {rank}: {message}")


def scaled(group) -> tuple:
    """A loss scale that doubles must not double what is owed."""
    rank = torch.distributed.get_rank(group)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
    attached = {"density": 0.05, "warmup_steps": 0, "scaler": scaler}
    plain = train(group, "plain", 16, {"density": 0.05, "warmup_steps": 0})[0]
    model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, attached)
    scales = []
    for step in range(16):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(called(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    handle.close()
    return plain, weights_of(model), scales


def test_residuals_follow_the_loss_scale(worlds):
    """Scales are powers of two, so a run with them has the very bits of the run without."""
    for plain, weights, scales in worlds.run(2, scaled):
        assert len(set(scales)) > 2
        for name, value in plain.items():
            assert torch.equal(value, weights[name]), name


def rates(group, follow: bool) -> float:
    """The norm of what is owed right after the rate fell to a tenth."""
    rank = torch.distributed.get_rank(group)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = oktopk.attach(
        model, density=0.01, warmup_steps=0, optimizer=optimizer if follow else None
    )
    for step in range(6):
        if step == 5:
            optimizer.param_groups[0]["lr"] = 0.01
        x, y = batch(rank, step)
        optimizer.zero_grad()
        (cross_entropy(model(x), y) * (0.0 if step == 5 else 1.0)).backward()
        optimizer.step()
    handle.close()
    return sum(float(owed.norm()) for owed in handle.residuals.values())


def test_residuals_follow_the_learning_rate_when_asked(worlds):
    follows, stays = worlds.run(2, rates, True), worlds.run(2, rates, False)
    for with_it, without in zip(follows, stays, strict=True):
        assert 5 < with_it / without < 15


def channels_last(group) -> tuple:
    """Whether gradients are conserved, and whether a state is in the order people read."""
    torch.manual_seed(0)
    net = torch.nn.Conv2d(8, 32, 3, bias=False).to(memory_format=torch.channels_last)
    model = DistributedDataParallel(net, process_group=group)
    handle = oktopk.attach(model, density=0.05, warmup_steps=0)
    x = torch.randn(2, 8, 8, 8).to(memory_format=torch.channels_last)  # the same on every rank
    alone = torch.autograd.grad(net(x).square().mean(), net.weight)[0]
    model(x).square().mean().backward()
    delivered = net.weight.grad + handle.residuals["weight"]
    state = handle.state_dict()
    saved = state["residuals"]["weight"]
    same_order = saved.is_contiguous() and torch.equal(saved, handle.residuals["weight"])
    handle.load_state_dict(state)
    loaded = torch.equal(saved, handle.residuals["weight"])
    handle.close()
    return delivered, alone, same_order, loaded, bool(saved.any())


def test_residuals_of_channels_last_parameters(worlds):
    for delivered, alone, *right in worlds.run(2, channels_last):
        torch.testing.assert_close(delivered, alone)
        assert right == [True, True, True]
