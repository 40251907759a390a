# SPDX-License-Identifier: Apache-2.0
"""A pool of real ranks: eight processes once cost seconds, per test they would cost minutes."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from oktopk import kernels
from oktopk.kernels.ready import make_ready

SIZES = (1, 2, 3, 4, 5, 8)
MIXED = 0
"""Instead of a number of threads: rank r has 1 + r."""


@cache
def forkserver():
    """A context whose processes start with everything imported and every kernel compiled."""
    # here, where no rank waits with a timeout; the server then finds them on disk
    make_ready([torch.float32, torch.float64])
    here = os.path.dirname(os.path.abspath(__file__))
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here not in known:  # the server does not inherit sys.path, only the environment
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, known)])
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    return context


@contextmanager
def threads(num: int):
    """So many torch threads for the calling thread, all of which the kernels use, even for a vector
    of a few entries: at its real value of `SPAN` they need millions."""
    span, before = kernels.MIN_VALUES, torch.get_num_threads()
    kernels.MIN_VALUES = 1
    torch.set_num_threads(num)
    try:
        assert len(kernels.thread_slices(torch.empty(2 * num))) == num
        yield
    finally:
        kernels.MIN_VALUES = span
        torch.set_num_threads(before)


def with_threads(group, num: int, fn, *args):
    """What fn(group, *args) returns when this rank has `num` threads."""
    with threads(1 + dist.get_rank(group) if num == MIXED else num):
        return fn(group, *args)


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
    while (task := pickle.loads(pipe.recv_bytes())) is not None:
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
        self.start()

    def start(self) -> None:
        context = forkserver()
        # kept as long as the processes: every new group meets at the file again
        self.folder = tempfile.TemporaryDirectory()
        rendezvous = os.path.join(self.folder.name, "rendezvous")
        ends = [context.Pipe() for _ in range(self.size)]
        self.pipes = [ours for ours, _ in ends]
        self.processes = [
            context.Process(target=_serve, args=(rank, self.size, rendezvous, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in ends:  # so that a dead process is seen as a closed pipe
            theirs.close()
        self.run(self.size, _ready)

    def run(self, P: int, fn, *args, threads: int | None = None, timeout: float = 40) -> list:
        """What fn(group, *args) returned on each of the first P ranks; raises if one did.

        A number of `threads`, or MIXED, is for each rank, and has kernels use them at any size.
        """
        if threads is not None:
            fn, args = with_threads, (threads, fn, *args)
        for pipe in self.pipes[:P]:
            pipe.send_bytes(pickle.dumps((P, fn, args)))
        answers = [self._answer(rank, timeout) for rank in range(P)]
        failures = [f"rank {r}:\n{text}" for r, (fine, text) in enumerate(answers) if not fine]
        if failures:
            self.restart()  # other ranks may be in the middle of something
            raise RuntimeError("\n".join(failures))
        return [answer for _, answer in answers]

    def _answer(self, rank: int, timeout: float) -> tuple:
        pipe = self.pipes[rank]
        if not pipe.poll(timeout):
            self.restart()
            raise TimeoutError(f"rank {rank} did not answer within {timeout} s")
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            return False, "the process died"

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps(None))
        for process in self.processes:
            process.join(10)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()


def _ready(group) -> None:
    dist.barrier(group)
