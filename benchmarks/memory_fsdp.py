# SPDX-License-Identifier: Apache-2.0
"""Bytes per parameter of a shard, as the process's own memory: dense HSDP and `attach_fsdp`.

    python benchmarks/memory_fsdp.py

Four ranks, two sites of two, train a stack of linear layers, each an FSDP module. `held` and `peak`
are as in benchmarks/memory.py, divided by the parameters that one rank stores: half of the model.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import oktopk
from memory import HOW, OPTIMIZERS, reset_peak, resident

WIDTH, LAYERS, WARMUP, STEPS, SITES, SHARDS = 1024, 24, 3, 10, 2, 2


def train(width: int, layers: int, name: str, sparse: bool) -> int:
    """Train, and return what is held before the last step of the optimizer, with gradients."""
    shape = (SITES, SHARDS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh["shard"] if sparse else mesh)
    optimizer = OPTIMIZERS[name](model.parameters())
    if sparse:
        how = {"optimizer": optimizer, "warmup_steps": WARMUP, "ramp_steps": 0} | HOW
        oktopk.attach_fsdp(model, mesh["replicate"], **how)
    x, held = torch.randn(8, width), 0
    for step in range(STEPS):
        if step == STEPS - 2:
            reset_peak()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step == STEPS - 1:
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed and not given back
            held = resident("VmRSS")
        optimizer.step()
    return held


def work(rank: int, where: str, name: str, sparse: bool, out) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    size = SITES * SHARDS
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=size)
    train(64, 2, name, sparse)  # load what is loaded once
    before = resident("VmRSS")
    held = train(WIDTH, LAYERS, name, sparse)
    out[rank] = held - before, resident("VmHWM") - before


def measured(name: str, sparse: bool) -> tuple[float, float]:
    """(held, peak) in bytes per parameter of a shard: the largest of the ranks."""
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        out = manager.dict()
        mp.spawn(work, (os.path.join(folder, "meet"), name, sparse, out), nprocs=SITES * SHARDS)
        numel = LAYERS * WIDTH * WIDTH // SHARDS
        held, peak = (max(values) / numel for values in zip(*out.values(), strict=True))
    return held, peak


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(f"{LAYERS * WIDTH * WIDTH:,} parameters, 2 sites of 2 ranks, density 2 %")
    print("| optimizer | HSDP: held | peak | attach_fsdp: held | peak |")
    print("|---|---|---|---|---|")
    for name in OPTIMIZERS:
        figures = [figure for sparse in (False, True) for figure in measured(name, sparse)]
        print(f"| {name} | " + " | ".join(f"{one:.1f}" for one in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
