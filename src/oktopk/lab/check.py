# SPDX-License-Identifier: Apache-2.0
"""`oktopk check`: a self-test on the user's own machines, under any launcher.

    oktopk check                                  # two workers on this machine
    oktopk check --workers 4
    torchrun --nproc-per-node 2 -m oktopk check   # where the job will run

It prints the backend, latency and bandwidth. Then it runs every method on small gradients and
checks its invariants: nothing is lost, all ranks agree, k means k.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import TorchTransport
from oktopk.exchange.reducer import Reducer
from oktopk.launch.ranks import read_rank_environment
from oktopk.launch.rendezvous import job_process_group
from oktopk.launch.workers import num_workers_to_start, run_local_workers
from oktopk.methods import MEGABYTE, METHODS, probe_link

WORKERS, NUMEL, DENSITY = 2, 20_000, 0.02
STEPS, QUICK_STEPS = 36, 4


def check(workers: int | None, timeout: float, quick: bool, argv: list[str]) -> int:
    """Run the self-test, in workers of its own if no launcher started any; return the exit code."""
    env = read_rank_environment()
    if number := num_workers_to_start(env, workers, WORKERS):
        return run_local_workers(number, argv)
    with job_process_group(env, timeout, {"command": "check", "quick": quick}) as device:
        return _check_rank(env.launcher if env else "oktopk", device, quick)


def _check_rank(launcher: str, device: torch.device, quick: bool) -> int:
    comm = Comm(TorchTransport())
    say = sys.stdout.write if comm.rank == 0 else len
    say(f"{comm.size} {'ranks' if comm.size > 1 else 'rank'} by {launcher}, ")
    say(f"{dist.get_backend()} on {device}, {torch.get_num_threads()} threads, ")
    say(f"torch {torch.__version__}\n")
    link = probe_link(comm, device, 1 if quick else 5)
    say(f"latency {link.latency * 1e6:.0f} microseconds, ")
    say(f"{link.bandwidth / MEGABYTE:.0f} MB/s sent per rank with all ranks sending\n")
    num_problems = 0
    for method in METHODS:
        problems = _violations(method, comm, device, QUICK_STEPS if quick else STEPS)
        num_problems += len(problems)
        say(f"{method:10} {'; '.join(problems) or 'keeps the laws'}\n")
    say("all is well\n" if not num_problems else f"FAILED: {num_problems} problems\n")
    return int(num_problems > 0)


def _violations(method: str, comm: Comm, device: torch.device, steps: int) -> list[str]:
    """Return the invariants that a method violates here, the same on every rank."""
    reducer = Reducer(NUMEL, method=method, density=DENSITY)
    generator = torch.Generator().manual_seed(comm.rank)
    problems = set()
    for _ in range(steps):
        grad = torch.randn(NUMEL, generator=generator).to(device)
        acc = grad + reducer.residual.to(device)
        stats = reducer.reduce_(grad)
        everyone = comm.all_gather_header(
            torch.stack([acc, grad, reducer.residual.to(device)]), stage="c"
        )
        lost = (everyone[:, 0].sum(0) - grad * comm.size - everyone[:, 2].sum(0)).abs().max()
        if lost > 1e-4:
            problems.add(f"loses {lost.item():.2g}")
        if not all(torch.equal(other, grad) for other in everyone[:, 1]):
            problems.add("the ranks do not agree")
        if method != "dense" and not 0.9 * stats.k <= stats.local <= stats.k:
            problems.add(f"selects {stats.local} for k = {stats.k}")
    return sorted(problems)
