# SPDX-License-Identifier: Apache-2.0
"""Local steps: which calls count as a step, in what order a step does its work, what it says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import oktopk

# Which calls count as a step.


class Parent(torch.optim.SGD):
    """Has had an instance of its own, so torch runs hooks in its `step` too."""


class Calling(Parent):
    """The `step` of a subclass calls that of its parent."""

    fails = ""

    def step(self, closure=None):
        if self.fails == "before":
            raise MemoryError
        loss = super().step(closure)
        if self.fails == "after":
            raise MemoryError
        return loss


class Replacing(Parent):
    """The `step` of a subclass does all by itself."""

    fails = ""

    def step(self, closure=None):
        if self.fails:
            raise MemoryError


class Retrying(Parent):
    """The `step` of a subclass catches what that of its parent raises."""

    fails = ""

    def step(self, closure=None):
        try:
            super().step(self._fail)
        except MemoryError:
            super().step(closure)

    def _fail(self):
        if self.fails:
            raise MemoryError


def tiny(kind=torch.optim.SGD, **more):
    model = nn.Linear(3, 2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = kind(model.parameters(), lr=0.1)
    return model, optimizer, oktopk.local_steps(model, optimizer, verbose=False, **more)


@pytest.mark.parametrize("fails", ["before", "after"])
@pytest.mark.parametrize("kind", [Calling, Replacing, Retrying])
def test_a_step_that_raised_does_not_change_how_the_next_ones_count(kind, fails):
    Parent([nn.Parameter(torch.ones(1))], lr=0.1)
    _, optimizer, handle = tiny(kind, every=100)
    counts = []
    for number in range(6):
        optimizer.fails = fails if number in (1, 3) else ""
        try:
            optimizer.step()
        except MemoryError:
            assert kind is not Retrying
        counts.append(handle.local_steps)
    handle.close()
    assert counts == ([1, 2, 3, 4, 5, 6] if kind is Retrying else [1, 1, 2, 2, 3, 4])


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("kind", [torch.optim.SGD, Calling])
def test_a_compiled_step_counts_once_and_the_exchange_is_not_traced(kind):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    Parent([nn.Parameter(torch.ones(1))], lr=0.1)
    _, optimizer, handle = tiny(kind, every=2)
    step = torch.compile(optimizer.step, backend=backend)
    try:
        for _ in range(4):
            step()
        assert handle.step == 2 and handle.local_steps == 0
        assert len(graphs) == 1, "the update of the weights alone"
    finally:
        torch._dynamo.reset()
        handle.close()
