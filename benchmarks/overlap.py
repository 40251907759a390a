# SPDX-License-Identifier: Apache-2.0
"""How much of the exchange hides behind backward.

    python benchmarks/overlap.py

Each rank trains a stack of linear layers whose backward takes long, once with `attach` as it is and
once with the exchange held back until backward is over (`clip_before` needs the whole gradient).
`exposed` is the time the training thread waits after its last gradient is ready. The last line is
the ratio: exposed with overlap over the exchange run alone. Ranks are processes on this machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import oktopk


def measure(args, overlap: bool) -> list[oktopk.StepStats]:
    torch.manual_seed(0)
    layers = [nn.Linear(args.width, args.width) for _ in range(args.layers)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=args.bucket_mb)
    seen: list[oktopk.StepStats] = []
    handle = oktopk.attach(
        model,
        density=args.density,
        wire="bf16",
        warmup_steps=0,
        on_step=seen.append,
        clip_before=None if overlap else float("inf"),
        exact_every=1000,
        group_numel=1,
    )
    x = torch.randn(args.batch, args.width)
    for _ in range(args.steps):
        model(x).square().mean().backward()
        model.zero_grad()
    handle.close()
    return [stats for stats in seen if stats.step > 17]  # past the whole-model steps of the start


def rank_main(rank: int, args, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=args.workers)
    rows = {"alone": measure(args, overlap=False), "overlapped": measure(args, overlap=True)}
    if rank == 0:
        numel = rows["alone"][0].numel
        print(f"{args.workers} ranks, {numel:,} gradients, density {args.density}")
        print(f"{'':12}{'select':>9}{'exchange':>9}{'scatter':>9}{'exposed':>9}   median ms")
        exposed = {}
        for name, stats in rows.items():
            columns = ("select", "exchange", "scatter", "exposed")
            medians = [1e3 * statistics.median(getattr(s, c) for s in stats) for c in columns]
            exposed[name] = medians[-1]
            print(f"{name:12}" + "".join(f"{ms:9.1f}" for ms in medians))
        print(f"exposed with overlap / alone: {exposed['overlapped'] / exposed['alone']:.2f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=400)
    parser.add_argument("--bucket-mb", type=float, default=4.0)
    parser.add_argument("--density", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (args, f"file://{os.path.join(folder, 'meet')}"), args.workers)


if __name__ == "__main__":
    main()
