"""`oktopk check`: a self-test on the user's own machines, under any launcher.

    oktopk check                                  # two workers on this machine
    oktopk check --workers 4
    torchrun --nproc-per-node 2 -m oktopk check   # where the job will run

It tells the backend, latency and bandwidth, then runs every method on small gradients and checks
the laws: nothing is lost, all ranks agree, k means k.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import TorchTransport
from oktopk.launch.local_workers import (
    find_place,
    joined,
    start_workers,
    workers_to_start,
)
from oktopk.methods import METHODS
from oktopk.methods.prediction import MEGABYTE, probe_link
from oktopk.reducer import Reducer

WORKERS, NUMEL, DENSITY = 2, 20_000, 0.02
STEPS, QUICK_STEPS = 36, 4


def check(workers: int | None, timeout: float, quick: bool, argv: list[str]) -> int:
    """Run the self-test; 0 when everything holds. Starts workers if no launcher has."""
    place = find_place()
    if number := workers_to_start(place, workers, WORKERS):
        return start_workers(number, argv)
    with joined(place, timeout, {"command": "check", "quick": quick}) as device:
        return _check_rank(place.launcher if place else "oktopk", device, quick)


def _check_rank(launcher: str, device: torch.device, quick: bool) -> int:
    comm = Comm(TorchTransport())
    say = sys.stdout.write if comm.rank == 0 else len
    say(f"{comm.size} {'ranks' if comm.size > 1 else 'rank'} by {launcher}, ")
    say(f"{dist.get_backend()} on {device}, {torch.get_num_threads()} threads, ")
    say(f"torch {torch.__version__}\n")
    link = probe_link(comm, device, 1 if quick else 5)
    say(f"latency {link.latency * 1e6:.0f} microseconds, ")
    say(f"{link.bandwidth / MEGABYTE:.0f} MB/s sent per rank with all ranks sending\n")
    complaints = 0
    for method in METHODS:
        problems = _broken_laws(method, comm, device, QUICK_STEPS if quick else STEPS)
        complaints += len(problems)
        say(f"{method:10} {'; '.join(problems) or 'keeps the laws'}\n")
    say("all is well\n" if not complaints else f"FAILED: {complaints} complaints\n")
    return int(complaints > 0)


def _broken_laws(method: str, comm: Comm, device: torch.device, steps: int) -> list[str]:
    """What is wrong with a method here, the same on every rank."""
    reducer = Reducer(NUMEL, method=method, density=DENSITY)
    generator = torch.Generator().manual_seed(comm.rank)
    problems = set()
    for _ in range(steps):
        grad = torch.randn(NUMEL, generator=generator).to(device)
        had = grad + reducer.residual.to(device)
        stats = reducer.reduce_(grad)
        everyone = comm.all_gather(torch.stack([had, grad, reducer.residual.to(device)]), stage="c")
        lost = (everyone[:, 0].sum(0) - grad * comm.size - everyone[:, 2].sum(0)).abs().max()
        if lost > 1e-4:
            problems.add(f"loses {lost.item():.2g}")
        if not all(torch.equal(other, grad) for other in everyone[:, 1]):
            problems.add("the ranks do not agree")
        if method != "dense" and not 0.9 * stats.k <= stats.local <= stats.k:
            problems.add(f"selects {stats.local} for k = {stats.k}")
    return sorted(problems)
