# SPDX-License-Identifier: Apache-2.0
"""Training loops as people write them, each run with plain DDP and with `attach`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk

CLASSES, WIDTH = 5, 48  # as small as has sparse tensors


class Net(nn.Module):
    """Several buckets, a norm, a tied weight, and a branch that only every third step uses."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(20, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.again.weight = self.middle.weight

    def forward(self, x, use_branch: bool = True):
        x = self.norm(torch.relu(self.inner(x)))
        x = torch.relu(self.middle(x))
        if use_branch:
            x = x + torch.relu(self.branch(x))
        return self.head(torch.relu(self.again(x)))


@dataclass(frozen=True)
class Idiom:
    """How a training script differs from the plainest one."""

    ddp: dict = field(default_factory=dict)
    tied: bool = False
    accumulate: int = 1
    skips_branch: bool = False
    freezes: bool = False
    evaluates: bool = False
    compiles: bool = False
    models: int = 1


SPARSE = {"density": 0.02, "warmup_steps": 3, "check_every": 7}  # arguments of attach

IDIOMS = {
    "plain": Idiom(),
    "no_sync": Idiom(accumulate=3),
    "find_unused_parameters": Idiom(ddp={"find_unused_parameters": True}, skips_branch=True),
    "static_graph": Idiom(ddp={"static_graph": True}),
    "frozen_then_unfrozen": Idiom(ddp={"find_unused_parameters": True}, freezes=True),
    "shared_parameters": Idiom(tied=True),
    "gradient_as_bucket_view": Idiom(ddp={"gradient_as_bucket_view": True}),
    "several_models": Idiom(models=2),
    "evaluation_between_steps": Idiom(evaluates=True),
    "torch_compile": Idiom(ddp={"bucket_cap_mb": 2}, compiles=True),
}


def batch(rank: int, step: int, size: int = 8):
    g = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(size, 20, generator=g)
    return x, x[:, :CLASSES].argmax(1)


def build(group, idiom: Idiom, seed: int, attached: dict | None):
    torch.manual_seed(seed)
    net = Net(idiom.tied)
    settings = {"bucket_cap_mb": 0.02} | idiom.ddp
    model = DistributedDataParallel(net, process_group=group, **settings)
    handle = oktopk.attach(model, **attached) if attached is not None else None
    called = torch.compile(model, backend="aot_eager") if idiom.compiles else model
    return model, called, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), handle


def one_step(model, called, optimizer, idiom: Idiom, rank: int, step: int) -> None:
    optimizer.zero_grad()
    if idiom.freezes:
        model.module.branch.requires_grad_(step % 4 >= 2)
    for part in range(idiom.accumulate):
        x, y = batch(rank, idiom.accumulate * step + part)
        use_branch = not (idiom.skips_branch and step % 3)
        if part < idiom.accumulate - 1:
            with model.no_sync():
                (cross_entropy(called(x, use_branch), y) / idiom.accumulate).backward()
        else:
            (cross_entropy(called(x, use_branch), y) / idiom.accumulate).backward()
    optimizer.step()
    if idiom.evaluates:
        model.eval()
        with torch.no_grad():
            called(batch(rank, 10**6 + step)[0])
        model.train()


def weights_of(model) -> dict:
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def train(group, name: str, steps: int, attached: dict | None = None) -> list[dict]:
    """The weights of every model after `steps`; `attached` are the arguments of `attach`."""
    idiom = IDIOMS[name]
    rank = torch.distributed.get_rank(group)
    built = [build(group, idiom, seed, attached) for seed in range(idiom.models)]
    for step in range(steps):
        for model, called, optimizer, _ in built:
            one_step(model, called, optimizer, idiom, rank, step)
    for _, _, _, handle in built:
        if handle is not None:
            assert handle.step == steps
            handle.close()
    return [weights_of(model) for model, _, _, _ in built]


def assert_same_bits(ranks) -> None:
    for other in ranks[1:]:
        for mine, its in zip(ranks[0], other, strict=True):
            for parameter, value in mine.items():
                assert torch.equal(value, its[parameter]), parameter
