# SPDX-License-Identifier: Apache-2.0
"""Programs of frameworks, as short as they can be, in ranks that have a process group already."""

from __future__ import annotations

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

WIDTH, BATCH, NUM_STEPS, STOP = 48, 4, 10, 6
SPARSE = {"density": 0.05, "warmup_steps": 2, "ramp_steps": 2, "verbose": False}


@contextmanager
def torchrun_environment():
    """The variables that torchrun sets, by which frameworks find out who they are."""
    rank, size = dist.get_rank(), dist.get_world_size()
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,  # nobody connects: the process group is there
        "TORCHELASTIC_RUN_ID": "test",
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
    }
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield rank
    finally:
        os.environ.clear()
        os.environ.update(before)


def dataset(num: int = 2 * BATCH * NUM_STEPS) -> TensorDataset:
    x = torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.roll(1, dims=1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def result(model: nn.Module, handle) -> dict:
    """What two runs must have in common, to the bit: the weights, and this rank's residuals."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    residuals = {name: r.clone() for name, r in handle.residuals.items()}
    return {"weights": weights, "residuals": residuals, "step": handle.step}
