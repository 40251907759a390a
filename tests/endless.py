"""A rank that trains until it cannot: `python endless.py RANK SIZE RENDEZVOUS WARMUP`."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from idioms import IDIOMS, build, one_step


def main(rank: int, size: int, rendezvous: str, warmup: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )
    attached = {"density": 0.05, "warmup_steps": warmup, "timeout": 4.0}
    model, called, optimizer, handle = build(None, IDIOMS["plain"], 0, attached)
    for step in range(100_000):
        one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
        if handle.step == 10:
            print("ten steps", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
