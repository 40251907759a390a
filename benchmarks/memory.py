# SPDX-License-Identifier: Apache-2.0
"""Bytes per parameter of plain DDP and of `oktopk.attach`, measured as the process's own memory.

    python benchmarks/memory.py

Two ranks train a stack of linear layers. Each case runs in processes of its own. `held` is what
stays between steps, `peak` the most in a sparse step; both over what the process had before there
was a model, divided by the number of parameters. The peak has what the allocator keeps for later.
Linux with glibc only: it reads /proc/self/status.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oktopk

WIDTH, LAYERS, WARMUP, STEPS = 1024, 24, 3, 10
HOW = {"density": 0.02, "wire": "bf16"}
OPTIMIZERS = {
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def resident(key: str) -> int:
    """VmRSS (now) or VmHWM (the most since the last reset), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def work(rank: int, where: str, dtype: str, optimizer_name: str, sparse: bool, out) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
    warm(sparse)
    before = resident("VmRSS")
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model = DistributedDataParallel(net.to(DTYPES[dtype]), gradient_as_bucket_view=True)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    if sparse:
        oktopk.attach(model, optimizer=optimizer, warmup_steps=WARMUP, ramp_steps=0, **HOW)
    x = torch.randn(8, WIDTH, dtype=DTYPES[dtype])
    for step in range(STEPS):
        if step == STEPS - 2:
            reset_peak()
        optimizer.zero_grad(set_to_none=False)
        model(x).float().square().mean().backward()
        optimizer.step()
    peak = resident("VmHWM")
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed and not given back is not held
    out[rank] = resident("VmRSS") - before, peak - before


def warm(sparse: bool) -> None:
    """Load what is loaded once, so that it is not counted: kernels, gloo's buffers, autograd."""
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    handle = oktopk.attach(model, optimizer=optimizer, warmup_steps=1, **HOW) if sparse else None
    for _ in range(6):
        model(torch.randn(2, 64)).square().mean().backward()
        optimizer.step()
    if handle is not None:
        handle.close()


def measured(dtype: str, optimizer: str, sparse: bool) -> tuple[float, float]:
    """(held, peak) in bytes per parameter: the larger of the two ranks."""
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        out = manager.dict()
        args = (os.path.join(folder, "rendezvous"), dtype, optimizer, sparse, out)
        mp.spawn(work, args, nprocs=2)
        numel = LAYERS * WIDTH * WIDTH
        held, peak = (max(values) / numel for values in zip(*out.values(), strict=True))
    return held, peak


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(f"{LAYERS * WIDTH * WIDTH:,} parameters, 2 ranks, density 2 %; bytes per parameter")
    print("| gradients | optimizer | DDP: held | peak | oktopk: held | peak |")
    print("|---|---|---|---|---|---|")
    for dtype, optimizer in product(DTYPES, OPTIMIZERS):
        figures = [
            figure for sparse in (False, True) for figure in measured(dtype, optimizer, sparse)
        ]
        print(f"| {dtype} | {optimizer} | " + " | ".join(f"{one:.1f}" for one in figures) + " |")


if __name__ == "__main__":
    main()
