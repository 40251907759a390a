# SPDX-License-Identifier: Apache-2.0
"""Programs of frameworks, as short as they can be, in ranks that have a process group already."""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

WIDTH, BATCH, NUM_STEPS, STOP = 48, 4, 10, 6
SPARSE = {"density": 0.05, "warmup_steps": 2, "ramp_steps": 2, "verbose": False}


@contextmanager
def no_warnings():
    """Nothing is wrong in the block, so oktopk must not warn of anything."""
    lines, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("oktopk").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("oktopk").removeHandler(handler)
    assert lines == []


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


def ray_worker(config: dict) -> None:
    """One worker, from the checkpoint that Ray has, if it has one, to the step `last`."""
    import ray.train
    import ray.train.torch

    from oktopk.integrations.ray import attach

    inner = net()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/model.pt", weights_only=True)
        inner.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model = ray.train.torch.prepare_model(inner)
    handle = attach(model, optimizer, **SPARSE)
    rank = ray.train.get_context().get_world_rank()
    batches = list(DataLoader(dataset(), batch_size=BATCH))[rank::2]
    for step in range(handle.step, config["last"]):
        optimizer.zero_grad()
        x, y = batches[step]
        mse_loss(model(x), y).backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        handle.save(folder)
        if rank == 0:
            states = {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states, f"{folder}/model.pt")
        torch.save(result(inner, handle), Path(config["folder"]) / f"{config['name']}-{rank}.pt")
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))
    handle.close()
