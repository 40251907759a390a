# SPDX-License-Identifier: Apache-2.0
"""Training loops of a model that FSDP2 shards inside sites, with dense HSDP as a reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy

import oktopk

CLASSES, WIDTH = 5, 49  # 49 rows cannot be divided evenly: the last shard has padding
ALL_SPARSE = oktopk.Policy(vectors=False, below=0)
SPARSE = {"density": 0.02, "warmup_steps": 2, "wire": "bf16"}

MESHES = [
    pytest.param(2, 4, id="2x2"),
    pytest.param(4, 8, id="4x2", marks=pytest.mark.slow),
    pytest.param(2, 8, id="2x4", marks=pytest.mark.slow),
]
"""Replicas, and ranks in all."""


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Net(nn.Module):
    """Two blocks, each an FSDP module of its own, between two layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rank: int, step: int, size: int = 8):
    g = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(size, 20, generator=g)
    return x, x[:, :CLASSES].argmax(1)


@dataclass
class Site:
    """A model on this rank, and what it takes to train it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    handle: oktopk.FSDPHandle | None = None
    stats: list[oktopk.StepStats] = field(default_factory=list)


@cache  # every mesh has process groups of its own, each with threads, until the process ends
def mesh_of(replicas: int) -> DeviceMesh:
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, **more) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


def build(
    replicas: int, attached: dict | None, optimizer=None, preset: bool = False, **more
) -> Site:
    """A model on `replicas` sites; `attached` are the arguments of `attach_fsdp`, None is HSDP.

    With `preset`, `attach_fsdp` is told of the optimizer.
    """
    mesh, dtype = mesh_of(replicas), more.pop("dtype", torch.float32)
    torch.manual_seed(0)
    model = Net().to(dtype)
    make = optimizer or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    if attached is None:
        shard(model, mesh, **more)
        return Site(model, make(model.parameters()))
    shard(model, mesh["shard"], **more)
    site = Site(model, make(model.parameters()))
    how = {"on_step": site.stats.append, "check_every": 5} | attached
    if preset:
        how["optimizer"] = site.optimizer
    site.handle = oktopk.attach_fsdp(model, mesh["replicate"], **how)
    return site


def one_step(site: Site, step: int, *, rank: int | None = None, clip: float | None = None) -> None:
    rank = dist.get_rank() if rank is None else rank
    x, y = batch(rank, step)
    dtype = next(site.model.parameters()).dtype
    cross_entropy(site.model(x.to(dtype)), y).backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(site.model.parameters(), clip)
    site.optimizer.step()
    site.optimizer.zero_grad()


def shards_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's shards of the weights."""
    return {name: p._local_tensor.detach().clone() for name, p in model.named_parameters()}


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights, gathered inside the site."""
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def train(group, replicas: int, steps: int, attached: dict | None, **more) -> dict:
    """The whole weights after `steps`."""
    how = {name: more.pop(name) for name in ("clip",) if name in more}
    site = build(replicas, attached, **more)
    for step in range(steps):
        one_step(site, step, **how)
    weights = whole(site.model)
    if site.handle is not None:
        assert site.handle.step == steps
        site.handle.close()
    return weights


def assert_same_bits(ranks: list[dict]) -> None:
    for other in ranks[1:]:
        for name, value in ranks[0].items():
            assert torch.equal(value, other[name]), name


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
