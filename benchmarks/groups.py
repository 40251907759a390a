# SPDX-License-Identifier: Apache-2.0
"""What it is worth to exchange a model in several groups of buckets, while backward continues.

    python benchmarks/groups.py gpt --rates 1gbit,200mbit,50mbit

Every rank trains a model on random data in a network namespace of its own. At each rate the model
is exchanged in one group, in two and in four. A row has the median milliseconds from the start of
forward to the averaged gradient, of the slowest rank, and the part of it that ranks wait after
their last bucket. `--bucket-mb` is the size of DDP's buckets: what is one bucket is one group.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.lab.tasks.speech.lstman4 import Lstman4
from oktopk.lab.tasks.text import GPT
from oktopk.launch import network

FIRST, SETTLING, MEASURED = 18, 2, 4  # steps: of the run, and each time that groups change
ROUNDS = 4  # in each of which all numbers of groups are measured: the machine may get slower
NUM_GROUPS = (1, 2, 4)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Lstman4(hidden=256, layers=3, bidirectional=True, channels=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, torch.full((x.shape[0],), x.shape[3]))[0]


def linear() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1515, 1515) for _ in range(12)))


MODELS = {
    "gpt": (lambda: GPT(65), lambda: torch.randint(65, (3, 64))),
    "speech": (Speech, lambda: torch.randn(4, 1, 161, 80)),
    "linear": (linear, lambda: torch.randn(32, 1515)),
}


def timed_step(model: nn.Module, x: Tensor) -> float:
    model.zero_grad()
    dist.barrier()
    start = perf_counter()
    model(x).square().mean().backward()
    return perf_counter() - start


def work(args: argparse.Namespace) -> None:
    """Measure all rows; rank 0 shapes the links and prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    build, data = MODELS[args.model]
    model, x, seen = DistributedDataParallel(build(), bucket_cap_mb=args.bucket_mb), data(), []
    how = {"density": 0.02, "wire": "bf16", "exact_every": 1000}
    handle = oktopk.attach(model, warmup_steps=0, on_step=seen.append, **how)
    for _ in range(FIRST):
        timed_step(model, x)
    engine = handle.driver.engine
    numels = engine.buckets.numels
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(f"{args.model}: {sum(numels):,} gradients, {len(numels)} buckets {numels}", flush=True)
    for rate in args.rates.split(","):
        if dist.get_rank() == 0:
            network.shape(args.workers, rate)
        taken: dict[int, list[float]] = {}
        exposed: dict[int, list[float]] = {}
        for num in NUM_GROUPS * ROUNDS:
            size = -(-sum(numels) // num)
            handle.thread.call(lambda size=size: engine.regroup(size))
            for _ in range(SETTLING):
                timed_step(model, x)
            slowest = torch.tensor([timed_step(model, x) for _ in range(MEASURED)])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            groups = len(engine.buckets.groups)
            taken.setdefault(groups, []).extend(slowest.tolist())
            exposed.setdefault(groups, []).extend(stats.exposed for stats in seen[-MEASURED:])
        for groups in taken:
            ms = 1e3 * statistics.median(taken[groups])
            waited = 1e3 * statistics.median(exposed[groups])
            say(f"{rate:>9} {groups} groups {ms:8.1f} ms, {waited:8.1f} exposed", flush=True)
    handle.close()
    dist.destroy_process_group()


def start(args: argparse.Namespace) -> int:
    """Make the network and run a worker in each of its namespaces."""
    network.build(args.workers)
    common = os.environ | {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511"}  # rank 0
    common |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    common |= {"WORLD_SIZE": str(args.workers), "GLOO_SOCKET_IFNAME": network.DEVICE}
    workers = [
        subprocess.Popen(
            [*network.prefix(rank), sys.executable, *sys.argv],
            env=common | {"RANK": str(rank)},
        )
        for rank in range(args.workers)
    ]
    return max(worker.wait() for worker in workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rates", default="1gbit,200mbit,50mbit")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    args = parser.parse_args()
    if "RANK" in os.environ:
        work(args)
    elif network.inside():
        sys.exit(start(args))
    else:
        unshare = network._unshare()
        if unshare is None:
            sys.exit(f"no namespaces here: {network.why_not()}")
        network.mark_inside("groups")
        os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])


if __name__ == "__main__":
    main()
