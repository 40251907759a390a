# SPDX-License-Identifier: Apache-2.0
"""A rank that trains until it cannot, for tests that kill, stop or break one of several."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import rounds
from idioms import IDIOMS, build, one_step


def main(
    rank: int, size: int, init_method: str, attached: dict, steps: int = 10**9, odd: str = ""
) -> None:
    """Train, by local steps if `attached` has `every`, and say "ten steps" after ten of them.

    An `odd` rank breaks or sleeps in step 20.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=init_method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )
    if "every" in attached:
        model, optimizer, handle = rounds.start(None, **attached)
        called = model
    else:
        model, called, optimizer, handle = build(None, IDIOMS["plain"], 0, attached)
    for step in range(steps):
        if odd == "breaks" and step == 20:
            handle.driver.engine.begin = None  # an error on the communication thread
        if odd == "sleeps" and step == 20:
            time.sleep(600)
        one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
        if step == 9:
            print("ten steps", flush=True)


def into_file(path: str, *args) -> None:
    """As main, in a forked process, with all that it says in a file."""
    with open(path, "w", buffering=1) as said:
        os.dup2(said.fileno(), sys.stdout.fileno())
        os.dup2(said.fileno(), sys.stderr.fileno())
        main(*args)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        {"warmup_steps": 5, "verbose": False},
        steps=12,
    )
