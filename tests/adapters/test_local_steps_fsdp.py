# SPDX-License-Identifier: Apache-2.0
"""FSDP2 inside a site, local steps between sites: two sites of two ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import oktopk
from oktopk.errors import StateError
from rounds import same_state
from sites import Net, Site, assert_same_bits, batch, build, mesh_of, one_step, shard, shards_of

LOCAL = {"every": 3, "density": 0.1, "outer_momentum": 0.5, "outer_lr": 0.7, "check_every": 1}


def start(sites: int = 2, model: nn.Module | None = None, more: dict | None = None, **fsdp) -> Site:
    """A model that is sharded inside `sites` sites, with local steps between them."""
    mesh, how = mesh_of(sites), LOCAL | (more or {})
    torch.manual_seed(dist.get_rank() // mesh["shard"].size())  # every site has weights of its own
    model = Net() if model is None else model
    if isinstance(model, Net):
        shard(model, mesh["shard"], **fsdp)
    else:
        fully_shard(model, mesh=mesh["shard"], **fsdp)
    site = Site(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    how = {"group": mesh["replicate"].get_group(), "on_step": site.stats.append} | how
    site.handle = oktopk.local_steps(model, site.optimizer, **how)
    return site


def by_shard(answers: list) -> list[tuple]:
    """For each shard, the answers of the ranks that have it at every site."""
    return list(zip(answers[:2], answers[2:], strict=True))


# What an exchange leads to.


def rounds(group, steps: int, more: dict) -> tuple:
    site, seen = start(more=more), []
    for step in range(steps):
        one_step(site, step)
        seen.append(shards_of(site.model))
    site.handle.close()
    return seen, site.stats, site.handle.traffic


@pytest.mark.parametrize("method", ["auto", "oktopk", "dense"])
def test_equal_shards_have_equal_weights_after_every_exchange(worlds, method):
    answers = worlds.run(4, rounds, 9, {"method": method})
    for one, other in by_shard(answers):
        for step in range(9):
            equal = all(torch.equal(x, other[0][step][name]) for name, x in one[0][step].items())
            assert equal == (step % 3 == 2), step
    for row in (answers[:2], answers[2:]):
        for stats in zip(*(each[1] for each in row), strict=True):
            assert [each.skipped for each in stats] == [False, False]
    kept = [sum(each[1][i].k for each in answers[:2]) for i in range(3)]
    assert len(set(kept)) == 1
