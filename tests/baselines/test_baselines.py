# SPDX-License-Identifier: Apache-2.0
"""Baselines: each does what its paper or PyTorch's documentation says, and counts what it sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from oktopk.lab.baselines import LOCAL, local
from oktopk.lab.baselines.base import BaselineOptions
from oktopk.lab.baselines.local import BASELINES

STEPS, EVERY, WARMUP, DENSITY = 9, 3, 2, 0.1


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 5))


def batch(step: int, rank: int):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 20, generator=generator), torch.randint(5, (8,), generator=generator)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(group, name: str):
    """The weights after every step, whether they agree, and the bytes that were counted."""
    del group
    rank, size = dist.get_rank(), dist.get_world_size()
    model = network()
    if rank:  # every rank must take rank 0's weights
        with torch.no_grad():
            next(model.parameters()).add_(rank)
    optimizer = SGD(model.parameters(), lr=0.1)
    options = BaselineOptions(
        world_size=size, warmup_steps=WARMUP, every=EVERY, density=DENSITY, ddp_arguments={}
    )
    baseline = BASELINES[name](model, optimizer, options)
    found = []
    for step in range(STEPS):
        x, y = batch(step, rank)
        baseline.optimizer.zero_grad()
        cross_entropy(baseline.module(x), y).backward()
        baseline.after_backward()
        baseline.optimizer.step()
        stats = baseline.finish_step()
        assert stats.step == step and stats.exposed >= 0
        found.append((flat(model), baseline.weights_agree, stats.bytes_sent, stats.bytes_dense))
    return found


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("P", [1, 2, 3])
def test_weights_agree_where_the_baseline_says_so(worlds, P, name):
    ranks = worlds.run(P, trained, name)
    for step in range(STEPS):
        weights, agree, sent, dense = zip(*(rank[step] for rank in ranks), strict=True)
        assert len(set(agree)) == len(set(sent)) == 1
        if agree[0]:
            assert all(torch.equal(weights[0], other) for other in weights[1:]), step
        elif P > 1:
            assert not torch.equal(weights[0], weights[1])
        assert 0 <= sent[0] <= dense[0]
    assert any(agree for _, agree, _, _ in ranks[0])
    assert all(agree for _, agree, _, _ in ranks[0]) == (name not in LOCAL)


def plain_ddp(group):
    del group
    rank = dist.get_rank()
    model = DistributedDataParallel(network())
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return flat(model.module)


def test_ddp_dense_is_ddp(worlds):
    (expected, _), ours = worlds.run(2, plain_ddp), worlds.run(2, trained, "ddp_dense")
    assert torch.equal(ours[0][-1][0], expected)
    sent = [bytes_sent for _, _, bytes_sent, _ in ours[0]]
    assert sent == [4 * expected.numel()] * STEPS  # 2n(P-1)/P elements of 4 bytes


def test_fp16_sends_half_and_powersgd_less_after_the_warmup(worlds):
    half = [row[2] for row in worlds.run(2, trained, "ddp_fp16")[0]]
    low = [row[2] for row in worlds.run(2, trained, "ddp_powersgd_r1")[0]]
    dense = 4 * flat(network()).numel()
    assert half == [dense // 2] * STEPS
    # rank 1: 40 + 20 and 5 + 40 numbers for the matrices, 40 + 5 for the biases
    assert low == [dense] * WARMUP + [4 * (60 + 45 + 45)] * (STEPS - WARMUP)


def test_post_local_sgd_averages_weights_every_few_steps(worlds):
    sent = [row[2] for row in worlds.run(2, trained, "post_local_sgd")[0]]
    dense = 4 * flat(network()).numel()
    after = [dense if i % EVERY == 0 else 0 for i in range(STEPS - WARMUP)]
    assert sent == [dense] * WARMUP + after


def diloco_by_hand(group):
    """DiLoCo in a few lines: Nesterov momentum on the mean weight change."""
    del group
    rank, size = dist.get_rank(), dist.get_world_size()
    model = network()
    anchor, momentum = flat(model), torch.zeros(flat(model).numel())
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            change = anchor - flat(model)
            dist.all_reduce(change)
            change /= size
            momentum = 0.9 * momentum + change
            anchor = anchor - 0.7 * (change + 0.9 * momentum)
            with torch.no_grad():
                nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
    return flat(model)


def test_diloco_is_diloco(worlds):
    (expected, _), ours = worlds.run(2, diloco_by_hand), worlds.run(2, trained, "diloco")
    torch.testing.assert_close(ours[0][-1][0], expected, rtol=0, atol=1e-6)
    sent = [row[2] for row in ours[0]]
    dense = 4 * expected.numel()
    assert sent == [dense if (i + 1) % EVERY == 0 else 0 for i in range(STEPS)]


def sparseloco_by_hand(group):
    """SparseLoCo in a few lines, for tensors of one chunk: the top k of each, in 4 levels."""
    del group
    rank, size = dist.get_rank(), dist.get_world_size()
    model = network()
    anchor, residual = flat(model), torch.zeros(flat(model).numel())
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            residual = 0.95 * residual + anchor - flat(model)
            sent = torch.cat([in_levels(part) for part in residual.split(sizes_of(model))])
            residual -= sent
            total, senders = sent.clone(), (sent != 0).float()
            dist.all_reduce(total)
            dist.all_reduce(senders)
            anchor = anchor - total / senders.clamp(min=1)
            with torch.no_grad():
                nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
    assert size == 2  # a sum of two has the same bits in either order
    return flat(model)


def sizes_of(model: nn.Module) -> list[int]:
    return [p.numel() for p in model.parameters()]


def in_levels(x: torch.Tensor) -> torch.Tensor:
    """The largest tenth; each entry becomes the mean of those on its side and of its size."""
    kept = x.abs() >= x.abs().sort().values[-max(1, round(DENSITY * x.numel()))]
    wide = 1.5 * x[kept].square().mean().sqrt()
    result = torch.zeros_like(x)
    for low, high in ((-torch.inf, -wide), (-wide, 0), (0, wide), (wide, torch.inf)):
        where = kept & (x > low) & (x <= high)
        if where.any():
            result[where] = x[where].mean()
    return result


def test_sparseloco_is_sparseloco(worlds):
    """And what it counts is what its messages hold: a table, and 14 bits for each entry."""
    (expected, _), ours = worlds.run(2, sparseloco_by_hand), worlds.run(2, trained, "sparseloco")
    torch.testing.assert_close(ours[0][-1][0], expected, rtol=0, atol=1e-6)
    entries = [max(1, round(DENSITY * numel)) for numel in sizes_of(network())]
    words = sum(4 + -(-14 * num // 32) for num in entries)
    sent = [row[2] for row in ours[0]]
    assert sent == [4 * words if (i + 1) % EVERY == 0 else 0 for i in range(STEPS)]


@pytest.mark.parametrize("numel", [1, 5, 4095, 4096, 4097, 3 * 4096 + 100])
@pytest.mark.parametrize("density", [1e-4, 0.03, 1.0])
def test_messages_of_sparseloco_arrive_as_they_were(numel, density):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    sent = local.select(x, density)
    words = local.write(sent)
    assert words.numel() == local.num_words(numel, density)
    read = local.read(words, numel, density)
    assert torch.equal(read.indices, sent.indices) and torch.equal(read.values, sent.values)
    assert len(sent.indices.unique()) == len(sent.indices)
