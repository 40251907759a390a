# SPDX-License-Identifier: Apache-2.0
"""Ranks with several torch threads end with the same bits as ranks with one: DDP, local steps."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import SPARSE, assert_same_bits, train
from oktopk import METHODS
from worlds import MIXED


class Tables(nn.Module):
    """Gradients entry by entry: those of a matrix product depend on the number of threads."""

    def __init__(self, numels: list[int]) -> None:
        super().__init__()
        self.tables = nn.ParameterList(nn.Parameter(torch.zeros(numel, 1)) for numel in numels)

    def forward(self, targets):
        pairs = zip(self.tables, targets, strict=True)
        return sum((table - target).square().sum() / 2 for table, target in pairs)


def trained(group, numels: list[int], steps: int, attached: dict) -> tuple[list, set[int]]:
    """The weights after `steps`, and how many threads the communication thread could use."""
    rank, seen = torch.distributed.get_rank(group), set()
    model = DistributedDataParallel(Tables(numels), process_group=group, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    note = {"on_step": lambda stats: seen.add(torch.get_num_threads())}
    handle = oktopk.attach(model, **attached, **note)
    take_steps(model, optimizer, rank, numels, steps)
    handle.close()
    return weights_of(model), seen


def trained_locally(group, numels: list[int], steps: int, how: dict) -> tuple[list, set[int]]:
    """The same with local steps on the bare model, whose exchange is on the calling thread."""
    rank, seen = torch.distributed.get_rank(group), set()
    model = Tables(numels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    note = {"on_step": lambda stats: seen.add(torch.get_num_threads())}
    outer = oktopk.local_steps(model, optimizer, group=group, **how, **note)
    take_steps(model, optimizer, rank, numels, steps)
    outer.close()
    return weights_of(model), seen


def take_steps(model, optimizer, rank: int, numels: list[int], steps: int) -> None:
    for step in range(steps):
        g = torch.Generator().manual_seed(1000 * rank + step)
        targets = [torch.randn(numel, 1, generator=g) for numel in numels]
        optimizer.zero_grad()
        model(targets).backward()
        optimizer.step()


def weights_of(model) -> list:
    return [dict(enumerate(p.detach().clone() for p in model.parameters()))]


NUMELS = [3000, 2500, 40, 4100]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("group_numel", [1, 2**25])
def test_attach_gives_the_same_weights_with_any_number_of_threads(worlds, method, group_numel):
    asked = {**SPARSE, "method": method, "group_numel": group_numel}

    @cache
    def run(num):
        return worlds.run(2, trained, NUMELS, 12, asked, threads=num)

    for num in (1, 2, 4, MIXED):
        weights, seen = zip(*run(num), strict=True)
        assert seen == (({1}, {2}) if num == MIXED else ({num}, {num}))
        assert_same_bits([*weights, run(1)[0][0]])


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_local_steps_give_the_same_weights_with_any_number_of_threads(worlds, method):
    how = {"method": method, "every": 3, "density": 0.1, "verbose": False}

    @cache
    def run(num):
        return worlds.run(2, trained_locally, NUMELS, 12, how, threads=num)

    for num in (1, 2, 4, MIXED):
        weights, seen = zip(*run(num), strict=True)
        assert seen == (({1}, {2}) if num == MIXED else ({num}, {num}))
        assert_same_bits([*weights, run(1)[0][0]])


@pytest.mark.parametrize("num", [2, MIXED])
def test_ranks_that_compute_with_threads_have_the_same_bits(worlds, num):
    assert_same_bits(worlds.run(2, train, "plain", 12, SPARSE, threads=num))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("group_numel", [1, 2**25])
def test_attach_with_nine_million_weights(worlds, method, group_numel):
    """Buckets so large that kernels use two threads, and more steps than the warm-up has."""
    asked = {"density": 0.02, "warmup_steps": 1, "method": method, "group_numel": group_numel}
    numels = [4_500_000, 50, 4_400_000, 100_000]
    runs = [worlds.run(2, at_real_size, n, numels, 11, asked, timeout=110) for n in (1, 2, MIXED)]
    assert [[seen for _, seen in ranks] for ranks in runs] == [[{1}] * 2, [{2}] * 2, [{1}, {2}]]
    assert_same_bits([weights for ranks in runs for weights, _ in ranks])


def at_real_size(group, num: int, *args):
    torch.set_num_threads(1 + torch.distributed.get_rank(group) if num == MIXED else num)
    try:
        return trained(group, *args)
    finally:
        torch.set_num_threads(1)
