"""A pool of real ranks: eight processes once cost seconds, per test they would cost minutes."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from oktopk import kernels

SIZES = (1, 2, 3, 4, 5, 8)


def warm_kernels() -> None:
    """Compile the numba kernels once, into their cache, before eight processes need them."""
    for dtype in (torch.float32, torch.float64):
        x = torch.arange(1.0, 200.0, dtype=dtype)
        kernels.kth_magnitude(x, 3)
        local, _ = kernels.select(x, 5.0, 300)
        kernels.accumulate_select(x.clone(), x, 5.0, 300)
        kernels.merge(local.indices, local.values, [local.num], 0, x.numel())
        kernels.settle_(x.clone(), x, local, local, 2)


def _serve(rank: int, size: int, rendezvous: str, pipe) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )
    groups = {P: dist.new_group(list(range(P))) for P in SIZES if size >= P}
    while (task := pipe.recv()) is not None:
        P, fn, args = task
        try:
            answer = (True, fn(groups[P], *args))
        except Exception:  # noqa: BLE001 - whatever it is, the test must see it
            answer = (False, traceback.format_exc())
        # plain pickle: a pipe would share every tensor through a file descriptor of its own
        pipe.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


class World:
    """`size` gloo processes on loopback, with a group of the first P for every P tested."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "numba", "oktopk", "worlds"])
        with tempfile.TemporaryDirectory() as folder:
            rendezvous = os.path.join(folder, "rendezvous")
            ends = [context.Pipe() for _ in range(size)]
            self.pipes = [ours for ours, _ in ends]
            self.processes = [
                context.Process(target=_serve, args=(rank, size, rendezvous, theirs), daemon=True)
                for rank, (_, theirs) in enumerate(ends)
            ]
            for process in self.processes:
                process.start()
            self.run(size, _ready)  # the file must stay until everyone has met

    def run(self, P: int, fn, *args, timeout: float = 90) -> list:
        """What fn(group, *args) returned on each of the first P ranks; raises if one did."""
        for pipe in self.pipes[:P]:
            pipe.send((P, fn, args))
        answers = []
        for rank, pipe in enumerate(self.pipes[:P]):
            if not pipe.poll(timeout):
                self.kill()
                raise TimeoutError(f"rank {rank} of {P} did not answer within {timeout} s")
            answers.append(pickle.loads(pipe.recv_bytes()))
        failures = [f"rank {r}:\n{text}" for r, (fine, text) in enumerate(answers) if not fine]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()


def _ready(group) -> None:
    dist.barrier(group)
