"""`oktopk check`: a self-test on the user's own machines, under any launcher.

    oktopk check                                  # two workers on this machine
    oktopk check --workers 4
    torchrun --nproc-per-node 2 -m oktopk check   # where the job will run

It tells the backend, latency and bandwidth, then runs every method on small gradients and checks
the laws: nothing is lost, all ranks agree, k means k.
"""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from oktopk.comm import Comm, TorchTransport
from oktopk.launch import Place, find_place, meeting_point
from oktopk.methods import METHODS
from oktopk.reducer import Reducer

NUMEL, STEPS, DENSITY = 20_000, 36, 0.02
MEGABYTE = 2**20


def check(workers: int, timeout: float) -> int:
    """Run the self-test; 0 when everything holds. Starts `workers` processes if nobody has."""
    place = find_place()
    if place is not None:
        return _check_rank(place, meeting_point(place), timeout)
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{os.path.join(folder, 'meet')}"
        try:
            spawn(_spawned, (workers, meeting, timeout), workers)
        except (ProcessRaisedException, ProcessExitedException) as error:
            sys.stdout.write(f"FAILED: {error}\n")
            return 1
    return 0


def _spawned(rank: int, size: int, meeting: str, timeout: float) -> None:
    sys.exit(_check_rank(Place("oktopk", rank, size), meeting, timeout))


def _check_rank(place: Place, meeting: str, timeout: float) -> int:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", place.rank % torch.cuda.device_count()) if cuda else "cpu"
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=meeting,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout),
    )
    say = sys.stdout.write if place.rank == 0 else len
    comm = Comm(TorchTransport())
    say(f"{place.size} ranks by {place.launcher}, {dist.get_backend()} on {device}, ")
    say(f"torch {torch.__version__}\n")
    latency, bandwidth = _measure(comm, torch.device(device))
    say(f"latency {latency * 1e6:.0f} microseconds, ")
    say(f"{bandwidth / MEGABYTE:.0f} MB/s sent per rank with all ranks sending\n")
    complaints = 0
    for method in METHODS:
        problems = _broken_laws(method, comm, torch.device(device))
        complaints += len(problems)
        say(f"{method:10} {'; '.join(problems) or 'keeps the laws'}\n")
    say("all is well\n" if not complaints else f"FAILED: {complaints} complaints\n")
    dist.destroy_process_group()
    return int(complaints > 0)


def _measure(comm: Comm, device: torch.device) -> tuple[float, float]:
    """Seconds of a smallest round, and bytes a rank sends per second in a large one."""
    small, large = torch.zeros(1, device=device), torch.zeros(MEGABYTE, device=device)
    seconds = {}
    for name, x, rounds in (("small", small, 20), ("large", large, 5)):
        comm.all_gather(x, stage="check")
        start = perf_counter()
        for _ in range(rounds):
            comm.all_gather(x, stage="check")
        seconds[name] = max((perf_counter() - start) / rounds, 1e-9)
    return seconds["small"], large.nbytes * (comm.size - 1) / seconds["large"]


def _broken_laws(method: str, comm: Comm, device: torch.device) -> list[str]:
    """What is wrong with a method here, the same on every rank."""
    reducer = Reducer(NUMEL, method=method, density=DENSITY)
    generator = torch.Generator().manual_seed(comm.rank)
    problems = set()
    for _ in range(STEPS):
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
