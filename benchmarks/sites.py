# SPDX-License-Identifier: Apache-2.0
"""Two sites that train one GPT: dense HSDP and `oktopk.attach_fsdp`, over a slow link between them.

    python benchmarks/sites.py --rate 100mbit

Each site is a network namespace with two processes, which FSDP2 shards the model over; what they
send to each other does not leave the namespace. What goes to the other site passes a link of the
given rate. Prints milliseconds per step (the median, of the slowest rank), the bytes that a site
sent in a step by the kernel's counter of its interface, and the loss after equally many steps.
Linux only: it needs `unshare`, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import oktopk
from oktopk.lab.tasks.text import GPT
from oktopk.launch import network

SITES, RANKS_PER_SITE = 2, 2
WARMUP, CONTEXT, BATCH = 3, 64, 4
INSIDE = "SITES_INSIDE"
CASES = {
    "dense HSDP": None,
    "attach_fsdp, 2 %": {"density": 0.02, "wire": "bf16"},
    "attach_fsdp, 1 %, int4": {"density": 0.01, "wire": "int4"},
}


def build(case: dict | None, args: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    shape = (SITES, RANKS_PER_SITE)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = GPT(256, layers=args.layers, heads=4, width=args.width, context=CONTEXT)
    where = mesh if case is None else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=where)
    fully_shard(model, mesh=where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if case is not None:
        more = {"warmup_steps": WARMUP, "ramp_steps": args.steps // 4} | case
        oktopk.attach_fsdp(model, mesh["replicate"], optimizer=optimizer, **more)
    return model, optimizer


def text() -> torch.Tensor:
    """Any text will do: the source of torch's optimizers."""
    files = sorted((Path(torch.__file__).parent / "optim").glob("*.py"))
    source = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).long()


def run(name: str, args: argparse.Namespace, data: torch.Tensor) -> None:
    """Train by one case and let rank 0 print its row."""
    model, optimizer = build(CASES[name], args)
    torch.manual_seed(1 + dist.get_rank())
    times, sent, losses = [], [], []
    for _ in range(args.steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1))
        batch = data[starts + torch.arange(CONTEXT + 1)]
        dist.barrier()
        before, start = network.bytes_sent(network.DEVICE), perf_counter()
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(perf_counter() - start)
        dist.barrier()
        sent.append(network.bytes_sent(network.DEVICE) - before)
        losses.append(loss.detach())
    table = torch.tensor([times, [float(loss) for loss in losses]])
    everyone = [torch.empty_like(table) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, table)
    seconds = torch.stack(everyone)[:, 0].amax(0)[args.steps // 2 :].tolist()
    loss = torch.stack(everyone)[:, 1, -10:].mean()
    if dist.get_rank() == 0:
        numel = sum(p.numel() for p in model.parameters())
        megabytes = statistics.median(sent[args.steps // 2 :]) / 1e6
        row = f"{name:<24} {1e3 * statistics.median(seconds):8.0f} ms {megabytes:8.3f} MB"
        sys.stdout.write(
            f"{row}   loss {loss:.3f} after {args.steps} steps, {numel:,} parameters\n"
        )
        sys.stdout.flush()


def work(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), SITES * RANKS_PER_SITE
    where = f"file://{os.environ['RENDEZVOUS']}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    data = text()
    for name in CASES:
        run(name, args, data)
    dist.destroy_process_group()


def start(args: argparse.Namespace) -> int:
    """Make the two sites, and a process for every rank."""
    network.build(SITES)
    network.shape(SITES, args.rate)
    with tempfile.TemporaryDirectory() as folder:
        shared = {"RENDEZVOUS": f"{folder}/meet", "GLOO_SOCKET_IFNAME": network.DEVICE}
        ranks = [
            subprocess.Popen(
                [*network.prefix(rank // RANKS_PER_SITE), sys.executable, *sys.argv],
                env=os.environ | shared | {"RANK": str(rank)},
            )
            for rank in range(SITES * RANKS_PER_SITE)
        ]
        return max(process.wait() for process in ranks)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="100mbit", help="of the link of a site (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="per case (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=256, help="default: %(default)s")
    args = parser.parse_args()
    network.check_rate(args.rate)
    if "RANK" in os.environ:
        work(args)
        return 0
    if INSIDE in os.environ:
        return start(args)
    unshare = network._unshare()
    if unshare is None:
        sys.stderr.write(f"no network here: {network.why_not()}\n")
        return 2
    os.environ[INSIDE] = "1"
    os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])
    return 0


if __name__ == "__main__":
    sys.exit(main())
