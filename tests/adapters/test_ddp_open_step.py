# SPDX-License-Identifier: Apache-2.0
"""States taken, and errors raised, while a step is under way: nothing of the residual is lost."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import IDIOMS, SPARSE, batch, build, one_step, train, weights_of
from oktopk.exchange.step import Step

STEPS = 14


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("out of memory, or any other error of the user's own")


def error_in_backward(group, set_to_none: bool) -> tuple:
    """The residuals before a backward that fails half-way, and after the gradients were zeroed."""
    rank = torch.distributed.get_rank(group)
    idiom = IDIOMS["gradient_as_bucket_view"]
    attached = {"density": 0.05, "warmup_steps": 0, "group_numel": 1}
    model, called, optimizer, handle = build(group, idiom, 0, attached)
    for step in range(9):
        one_step(model, called, optimizer, idiom, rank, step)
    before = handle.state_dict()["residuals"]
    fed, add_bucket = [], Step.add_bucket
    Step.add_bucket = lambda step, bucket, grad: (
        add_bucket(step, bucket, grad),
        fed.append(bucket),
    )
    inner = model.module.inner.register_forward_hook(lambda _, __, y: FailsInBackward.apply(y))
    x, y = batch(rank, 9)
    with pytest.raises(ArithmeticError):
        cross_entropy(called(x), y).backward()
    inner.remove()
    deadline = time.monotonic() + 10
    while not fed and time.monotonic() < deadline:
        time.sleep(0.01)
    Step.add_bucket = add_bucket
    optimizer.zero_grad(set_to_none=set_to_none)
    after = handle.state_dict()["residuals"]
    torch.distributed.barrier(group)
    handle.close()
    return before, after, len(fed)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_an_error_in_backward_takes_nothing_off_the_residual(worlds, set_to_none):
    for before, after, num_fed in worlds.run(2, error_in_backward, set_to_none):
        assert num_fed > 0, "no bucket had been accumulated"
        assert any(part.any() for part in before.values())
        for name, part in before.items():
            assert torch.equal(part, after[name]), name


def digest(state: dict) -> tuple:
    return tuple(float(part.double().sum()) for part in state["residuals"].values())


def states_from_another_thread(group) -> tuple:
    """Weights of a run in which a thread takes states all the time, and what those were."""
    rank = torch.distributed.get_rank(group)
    straight = train(group, "plain", STEPS, SPARSE)[0]
    model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, SPARSE)
    seen, over = [], threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.append(handle.state_dict())
            time.sleep(0.001)

    between = [digest(handle.state_dict())]
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for step in range(STEPS):
            one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
            between.append(digest(handle.state_dict()))
    finally:
        over.set()
        thread.join()
    handle.close()
    return straight, weights_of(model), {digest(state) for state in seen}, set(between)


def test_a_checkpoint_thread_sees_finished_steps_and_changes_nothing(worlds):
    for straight, weights, seen, between in worlds.run(2, states_from_another_thread):
        assert seen <= between and len(seen) > 1
        for name, value in straight.items():
            assert torch.equal(value, weights[name]), name


def state_inside_backward(group) -> tuple:
    """A state taken in the middle of a backward pass, which a run is then resumed from."""
    rank = torch.distributed.get_rank(group)
    straight = train(group, "plain", STEPS, SPARSE)[0]
    idiom, taken = IDIOMS["plain"], []
    model, called, optimizer, handle = build(group, idiom, 0, SPARSE)
    for step in range(8):
        one_step(model, called, optimizer, idiom, rank, step)
    weights, momentum = model.state_dict(), optimizer.state_dict()
    saved = {name: value.clone() for name, value in weights.items()}
    state = {k: {n: x.clone() for n, x in s.items()} for k, s in momentum["state"].items()}
    momentum = {"state": state, "param_groups": momentum["param_groups"]}
    hook = model.module.inner.weight.register_hook(lambda _: taken.append(handle.state_dict()))
    one_step(model, called, optimizer, idiom, rank, 8)
    hook.remove()
    handle.close()
    model, called, optimizer, handle = build(group, idiom, 1, SPARSE)
    for what, state in ((model, saved), (optimizer, momentum), (handle, taken[0])):
        what.load_state_dict(state)
    for step in range(8, STEPS):
        one_step(model, called, optimizer, idiom, rank, step)
    handle.close()
    return straight, weights_of(model)


def test_a_state_taken_inside_backward_resumes_with_the_same_bits(worlds):
    for straight, resumed in worlds.run(2, state_inside_backward):
        for name, value in straight.items():
            assert torch.equal(value, resumed[name]), name


def another_ranks_state(group) -> tuple:
    """What a rank says to the state of another, and what it has after the gathered ones."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    parts = build(group, IDIOMS["plain"], 0, SPARSE)
    for step in range(8):
        one_step(*parts[:3], IDIOMS["plain"], rank, step)
    handle = parts[3]
    before, gathered = handle.state_dict(), handle.gathered.state_dict()
    said = []
    for other in range(size):
        try:
            handle.load_state_dict(gathered["ranks"][other])
        except ValueError as error:
            said.append(str(error))
    handle.gathered.load_state_dict(gathered)
    after = handle.state_dict()
    one_step(*parts[:3], IDIOMS["plain"], rank, 8)
    handle.close()
    return before, after, said


def test_a_rank_refuses_the_state_of_another_and_takes_the_gathered_one(worlds):
    for rank, (before, after, said) in enumerate(worlds.run(3, another_ranks_state)):
        refused = f"rank {rank}: the state was saved by rank "
        others = "the ranks disagree: the loaded state is "
        assert [one.startswith(refused) for one in said] == [other != rank for other in range(3)]
        assert said[rank].startswith(others) and "refused on rank" in said[rank]
        for name, part in before["residuals"].items():
            assert torch.equal(part, after["residuals"][name]), name


def loaded_by_one_rank(group) -> str:
    """What a rank hears that loads a state in the middle of training, and the others do not."""
    rank = torch.distributed.get_rank(group)
    parts = build(group, IDIOMS["plain"], 0, SPARSE | {"timeout": 2.0})
    for step in range(8):
        one_step(*parts[:3], IDIOMS["plain"], rank, step)
    handle, said = parts[3], ""
    if rank == 1:
        try:
            handle.load_state_dict(handle.state_dict())
        except oktopk.ExchangeError as error:
            said = str(error)
    torch.distributed.barrier(group)
    one_step(*parts[:3], IDIOMS["plain"], rank, 8)  # nothing was loaded: training goes on
    torch.distributed.barrier(group)
    handle.close()
    return said


def test_a_rank_that_loads_alone_is_told_and_loads_nothing(worlds):
    heard = worlds.run(2, loaded_by_one_rank)
    assert heard[0] == ""
    assert heard[1].startswith("rank 0 did not call load_state_dict within 2 s of another rank")


def owed_to_dense(group) -> tuple:
    """All that was given and got, where a parameter that had a residual travels dense later."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(40, 40, bias=False), process_group=group)
    weight, g = model.module.weight, torch.Generator().manual_seed(rank)
    given, got, state = torch.zeros(40, 40), torch.zeros(40, 40), None
    for dense in ((), ("weight",)):
        policy = oktopk.Policy(below=0, patterns=dense)
        handle = oktopk.attach(model, density=0.05, warmup_steps=0, policy=policy)
        if state is not None:
            handle.load_state_dict(state)
        for _ in range(4):
            x = torch.randint(-4, 5, (40, 40), generator=g).float()
            model.zero_grad()
            model(torch.eye(40)).mul(x.T).sum().backward()
            given, got = given + x, got + weight.grad * size
        state = handle.state_dict()
        handle.close()
    return given, got, state["residuals"]["weight"]


def test_a_parameter_that_travels_dense_later_gets_what_it_is_owed(worlds):
    ranks = worlds.run(2, owed_to_dense)
    torch.testing.assert_close(ranks[0][1], ranks[0][0] + ranks[1][0])
    assert not any(owed.any() for _, _, owed in ranks)


def states_while_rates_change(group) -> list[tuple[float, float]]:
    """Learning rates in states beside the residual of an entry that is never sent."""
    rank = torch.distributed.get_rank(group)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = oktopk.attach(model, optimizer=optimizer, density=0.01, warmup_steps=0, ramp_steps=0)
    seen, over = [], threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.append(handle.state_dict())

    thread = threading.Thread(target=watch)
    thread.start()
    large = torch.ones(64, 64)
    large[:4] = 100.0 + rank
    try:
        for step in range(40):
            optimizer.param_groups[0]["lr"] = 1.0 if step % 2 else 0.5
            optimizer.zero_grad()
            # after the first step the last entry gets no gradient: it changes with the rate alone
            x = large.clone()
            x[-1, -1] = float(step == 0)
            model(torch.eye(64)).mul(x.T).sum().backward()
            optimizer.step()
    finally:
        over.set()
        thread.join()
        handle.close()
    return [
        (json.loads(state["metadata"])["residual_scaling"]["rates"]["weight"], float(owed[-1, -1]))
        for state in seen
        if (owed := state["residuals"]["weight"])[-1, -1]
    ]


def test_a_state_has_residuals_and_rates_of_the_same_moment(worlds):
    for pairs in worlds.run(2, states_while_rates_change):
        assert len({rate for rate, _ in pairs}) > 1
        products = {rate * owed for rate, owed in pairs}
        assert len(products) == 1, products


def frozen_base(group) -> tuple:
    """A large frozen layer under a small trained one, as with LoRA: what a state holds."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.AdamW(net[1].parameters())
    handle = oktopk.attach(model, optimizer=optimizer, density=0.05, warmup_steps=2)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    state = handle.state_dict()
    handle.load_state_dict(state)
    handle.close()
    return sorted(state["residuals"]), sorted(state["arrived"]), handle.driver.engine.buckets.numel


def test_frozen_parameters_have_no_residual_and_no_key(worlds):
    for residuals, arrived, numel in worlds.run(2, frozen_base):
        assert residuals == ["1.bias", "1.weight"]
        assert set(arrived) <= {"1.weight"}
        assert numel == 64 * 64 + 64


def compiled_inside(group) -> tuple:
    """Residual names with torch.compile inside of DDP; its state in a model without."""
    names = []
    for compiles in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 64))
        inner = torch.compile(net, backend="eager") if compiles else net
        model = DistributedDataParallel(inner, process_group=group)
        handle = oktopk.attach(model, density=0.05, warmup_steps=0)
        if not compiles:
            handle.load_state_dict(state)  # noqa: F821 - of the round before
        model(torch.randn(4, 64)).square().mean().backward()
        state = handle.state_dict()
        names.append(sorted(state["residuals"]))
        handle.close()
    return tuple(names)


def test_a_compiled_model_has_the_names_of_the_plain_one(worlds):
    for names in worlds.run(2, compiled_inside):
        assert names == (["0.bias", "0.weight"], ["0.bias", "0.weight"])
