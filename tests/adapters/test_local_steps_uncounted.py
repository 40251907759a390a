# SPDX-License-Identifier: Apache-2.0
"""Local steps: moves of the weights that no step counts, and parameters that no exchange has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import oktopk
from oktopk import simulate
from optimizers import SAM
from rounds import same, weights_of

UNCOUNTED = "backward passes have moved the weights, and no step() of"


class Lookahead(torch.optim.Optimizer):
    """It moves the weights once more after the optimizer in it."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.optimizer.step(closure)
        fast = [p.detach() for group in self.param_groups for p in group["params"]]
        torch._foreach_lerp_(self.slow, fast, 0.5)
        torch._foreach_copy_(fast, self.slow)


class Unhooked(torch.optim.SGD):
    """Is moved by a method of its own."""

    def update(self):
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                p.data.sub_(0.1 * p.grad)


def start(kind, **more):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    return model, optimizer, oktopk.local_steps(model, optimizer, verbose=False, **more)


def backward(model, rank: int = 0) -> torch.Tensor:
    x = torch.ones(4, 3) * (1 + rank)
    loss = mse_loss(model(x), x[:, :2])
    loss.backward()
    return loss


def said(caplog, text: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if text in r.getMessage()]


# Steps of another name.


def by_sam(comm, with_closure: bool) -> tuple:
    model, optimizer, handle = start(SAM, comm=comm, every=3)
    for _ in range(6):
        backward(model, comm.rank)
        if with_closure:
            optimizer.step(lambda: backward(model, comm.rank))
        else:
            optimizer.first_step()
            backward(model, comm.rank)
            optimizer.second_step()
    counts = handle.step, handle.local_steps
    handle.close()
    return counts, weights_of(model)


@pytest.mark.parametrize("with_closure", [False, True])
def test_each_step_of_sam_counts_once_by_either_interface(with_closure, caplog):
    ranks = simulate(2, lambda comm: by_sam(comm, with_closure))
    assert [counts for counts, _ in ranks] == [(2, 0)] * 2
    assert same(ranks[0][1], ranks[1][1])
    assert said(caplog, UNCOUNTED) == []


def by_lookahead(comm) -> dict:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    handle = oktopk.local_steps(model, optimizer, comm=comm, every=2, verbose=False)
    for _ in range(4):
        optimizer.zero_grad()
        backward(model, comm.rank)
        optimizer.step()
    assert handle.step == 2
    handle.close()
    return weights_of(model)


def test_the_exchange_comes_after_all_that_the_outermost_optimizer_moves():
    one, other = simulate(2, by_lookahead)
    assert same(one, other)


def test_moves_without_a_counted_step_are_said_once(caplog):
    model, optimizer, handle = start(Unhooked, every=2)
    for _ in range(40):
        optimizer.zero_grad()
        backward(model)
        optimizer.update()
    handle.close()
    assert [text[:30] for text in said(caplog, UNCOUNTED)] == ["16 backward passes have moved "]
    assert handle.step == 0


def accumulate(model, optimizer) -> None:
    for _ in range(40):
        backward(model)
    optimizer.step()


def steps(model, optimizer) -> None:
    for _ in range(40):
        backward(model)
        optimizer.step()


@pytest.mark.parametrize("act", [accumulate, steps])
def test_accumulated_gradients_and_counted_steps_are_no_reason_to_warn(act, caplog):
    model, optimizer, handle = start(torch.optim.SGD)
    act(model, optimizer)
    handle.close()
    assert said(caplog, UNCOUNTED) == []


def test_a_closure_that_moves_the_weights_often_is_one_step(caplog):
    model, optimizer, handle = start(torch.optim.LBFGS)

    def closure():
        optimizer.zero_grad()
        with torch.no_grad():
            model.bias.add_(0.1)
        return backward(model)

    optimizer.step(closure)
    assert optimizer.state[model.weight]["func_evals"] > 16
    assert handle.local_steps == 1
    handle.close()
    assert said(caplog, UNCOUNTED) == []


def test_nothing_watches_the_model_after_close(caplog):
    model, optimizer, handle = start(Unhooked)
    handle.close()
    for _ in range(20):
        backward(model)
        optimizer.update()
    assert said(caplog, UNCOUNTED) == []
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


# Parameters that no exchange has.

STRANGER = "trains parameters that are not in the model"


def with_head(comm) -> None:
    """A head and a temperature that the model does not have, and another head later."""
    model, head = nn.Linear(3, 2), nn.Linear(2, 5)
    groups = [
        {"params": model.parameters()},
        {"params": [*head.parameters(), nn.Parameter(torch.ones(()))]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    handle = oktopk.local_steps(model, optimizer, comm=comm, every=2, verbose=False)
    for step in range(8):
        backward(model, comm.rank)
        optimizer.step()
        if step == 3:
            optimizer.add_param_group({"params": nn.Linear(2, 7, bias=False).parameters()})
    handle.close()


def test_parameters_that_are_not_in_the_model_are_named_once(caplog):
    simulate(2, with_head)
    first, later = said(caplog, STRANGER)
    assert "parameter 0 of group 1 with the shape [5, 2], parameter 1 of group 1" in first
    assert "group 1 with the shape []; let the model have them as a submodule" in first
    assert "parameter 0 of group 2 with the shape [7, 2]" in later


def with_frozen_head(comm) -> None:
    model, head = nn.Linear(3, 2), nn.Linear(2, 5).requires_grad_(False)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    oktopk.local_steps(model, optimizer, comm=comm, verbose=False).close()


def test_one_rank_and_frozen_parameters_are_no_reason_to_warn(caplog):
    simulate(1, with_head)
    simulate(2, with_frozen_head)
    assert said(caplog, STRANGER) == []


def thawed_for(comm, how_long: range) -> str:
    """The bias is frozen at first, and trained in some of the steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.bias.requires_grad_(False)
    handle = oktopk.local_steps(model, optimizer, comm=comm, every=4, verbose=False)
    try:
        for step in range(8):
            model.bias.requires_grad_(step in how_long)
            optimizer.zero_grad()
            backward(model, comm.rank)
            optimizer.step()
    except ValueError as error:
        return str(error)
    finally:
        handle.close()
    return f"{handle.step} exchanges"


@pytest.mark.parametrize("how_long", [range(0), range(1, 3), range(2, 4)], ids=str)
def test_a_frozen_parameter_that_was_trained_within_a_round_is_named(how_long):
    for text in simulate(2, lambda comm: thawed_for(comm, how_long)):
        if how_long:
            assert "exchange 0: ['bias'] are trained and not exchanged" in text
        else:
            assert text == "2 exchanges"


def frozen_for(comm, how_long: range) -> tuple:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = oktopk.local_steps(
        model, optimizer, comm=comm, every=4, density=1.0, average="all", verbose=False
    )
    before = weights_of(model)
    for step in range(4):
        model.bias.requires_grad_(step not in how_long)
        optimizer.zero_grad()
        backward(model, comm.rank)
        optimizer.step()
    handle.close()
    return before, weights_of(model)


@pytest.mark.parametrize("how_long", [range(1, 3), range(2, 4), range(4)], ids=str)
def test_what_a_parameter_moved_before_it_was_frozen_is_exchanged(how_long):
    (before, one), (_, other) = simulate(2, lambda comm: frozen_for(comm, how_long))
    assert same(one, other)
    assert torch.equal(one["bias"], before["bias"]) == (how_long == range(4))
