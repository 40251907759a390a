# SPDX-License-Identifier: Apache-2.0
"""`with model.join():` ranks with fewer batches shadow the others, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import Net, batch

LR = 0.05


def build(group, make_optimizer, attached: dict | None, **ddp):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.02, **ddp)
    optimizer = make_optimizer(model.parameters())
    handle = None if attached is None else oktopk.attach(model, **attached)
    return model, optimizer, handle


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def num_batches(rank: int) -> int:
    return 9 + 4 * ((rank + 1) % 3)  # 13, 17, 9: the last to join is neither the first nor the last


def epoch(model, optimizer, rank: int, number: int = 0, **join):
    """One epoch; what this rank computed and what it was given, summed over its steps."""
    computed = [torch.zeros_like(p) for p in model.parameters()]
    given = [torch.zeros_like(p) for p in model.parameters()]
    with model.join(**join):
        for step in range(num_batches(rank)):
            x, y = batch(rank, 100 * number + step)
            own = torch.autograd.grad(cross_entropy(model.module(x), y), list(model.parameters()))
            torch._foreach_add_(computed, own)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            torch._foreach_add_(given, [p.grad for p in model.parameters()])
            optimizer.step()
    return computed, given


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def uneven(group, attached: dict, find_unused: bool) -> dict:
    rank = dist.get_rank(group)
    attached = {"density": 0.02, "warmup_steps": 3, **attached}
    model, optimizer, handle = build(group, sgd, attached, find_unused_parameters=find_unused)
    computed, given = epoch(model, optimizer, rank)
    weights, residuals = flat(model.parameters()), handle.residuals
    found = {
        "computed": flat(computed),
        "given": flat(given),
        "residual": flat(residuals[name] for name, _ in model.module.named_parameters()),
        "weights": weights,
        "has joined": handle.driver.has_joined,
    }
    epoch(model, optimizer, rank, 1)  # all are compared again
    found["steps"], found["weights later"] = handle.step, flat(model.parameters())
    handle.close()
    return found


@pytest.mark.parametrize(
    ("P", "attached", "find_unused"),
    [(P, {"check_every": every}, False) for P in (2, 3) for every in (1, 3)]
    + [
        (2, {"check_every": 2, "method": method}, False)
        for method in oktopk.METHODS
        if method not in ("oktopk", "dense")
    ]
    + [(3, {"check_every": 2}, True), (3, {"check_every": 2, "clip_before": 1e6}, False)],
)
def test_ranks_with_fewer_batches_lose_nothing_and_end_with_the_same_weights(
    worlds, P, attached, find_unused
):
    ranks = worlds.run(P, uneven, attached, find_unused)
    longest = max(range(P), key=num_batches)
    for rank, found in enumerate(ranks):
        assert found["has joined"] == (num_batches(rank) < num_batches(longest))
        assert found["steps"] == 2 * num_batches(longest)
        assert torch.equal(found["weights"], ranks[longest]["weights"])
        assert torch.equal(found["weights later"], ranks[longest]["weights later"])
    computed = sum(found["computed"] for found in ranks)
    left = sum(found["residual"] for found in ranks)
    torch.testing.assert_close(
        P * ranks[longest]["given"] + left, computed, rtol=1e-4, atol=1e-4 * computed.abs().max()
    )
    assert left.any()


def with_momentum(group, attached: dict | None, copies: bool) -> tuple:
    rank, P = dist.get_rank(group), dist.get_world_size(group)
    model, optimizer, handle = build(group, momentum, attached)
    told = ""
    try:
        for number in range(2):
            epoch(model, optimizer, rank, number)
            if copies:
                last = max(range(P), key=lambda each: (num_batches(each), each))
                states = [optimizer.state_dict()]
                dist.broadcast_object_list(states, src=dist.get_global_rank(group, last))
                optimizer.load_state_dict(states[0])
        # one more step, so that what the second epoch did is compared
        x, y = batch(rank, 7)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    except RuntimeError as error:
        told = str(error)
    weights = flat(model.parameters())
    if handle is not None:
        handle.close()
    return weights, told


SPARSE = {"density": 0.02, "warmup_steps": 2, "check_every": 1, "timeout": 6}


def test_momentum_after_a_join_makes_replicas_of_plain_ddp_differ(worlds):
    (first, _), (second, _) = worlds.run(2, with_momentum, None, False)
    assert not torch.equal(first, second)


def test_replicas_that_differ_after_a_join_are_found_and_the_join_is_named(worlds):
    for _, told in worlds.run(2, with_momentum, SPARSE, False):
        assert "differ between rank 0 and rank 1; there was a join before" in told


def test_replicas_stay_the_same_where_the_optimizer_is_copied_after_a_join(worlds):
    (first, told), (second, _) = worlds.run(2, with_momentum, SPARSE, True)
    assert told == ""
    assert torch.equal(first, second)


def adam_recipe(group) -> tuple:
    """As docs/guides/ddp.md shows."""
    rank, P = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.02)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    handle = oktopk.attach(model, optimizer=optimizer, ramp_steps=0, **SPARSE)
    for number in range(3):
        epoch(model, optimizer, rank, number)
        last = max(range(P), key=lambda each: (num_batches(each), each))
        mine = handle.state_dict()
        states = [optimizer.state_dict(), mine["arrived"]]
        dist.broadcast_object_list(states, src=dist.get_global_rank(group, last))
        optimizer.load_state_dict(states[0])
        handle.load_state_dict(mine | {"arrived": states[1]})
    handle.close()
    return flat(model.parameters()), handle.settings.staleness_correction, handle.step


def test_adam_after_a_join(worlds):
    (first, late, steps), (second, *_) = worlds.run(2, adam_recipe)
    assert late and steps == 3 * num_batches(1)
    assert torch.equal(first, second)


def other_join(group, join: dict) -> str:
    rank = dist.get_rank(group)
    model, optimizer, handle = build(group, sgd, SPARSE)
    try:
        epoch(model, optimizer, rank, **join)
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        handle.close()
    return "no error"


def test_a_join_that_divides_by_the_ranks_left_is_refused(worlds):
    for told in worlds.run(2, other_join, {"divide_by_initial_world_size": False}):
        assert "join(divide_by_initial_world_size=False) does not work with attach" in told


def test_a_join_that_ends_with_the_first_rank_ends_on_all(worlds):
    first, second = worlds.run(2, other_join, {"throw_on_early_termination": True})
    assert "Rank 0 exhausted all inputs" in first
    assert "Detected at least one rank that exhausted inputs" in second
