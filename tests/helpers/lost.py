# SPDX-License-Identifier: Apache-2.0
"""A rank of a real training run that is lost, or fails, at a named place; for tests."""

from __future__ import annotations

import os
import signal
import sys

from torch.nn.parallel import DistributedDataParallel

from oktopk.errors import ExchangeError, LaunchError, RunError
from oktopk.lab.train import checkpoint, loop, run, setup
from oktopk.lab.train.config import make_config
from oktopk.launch.ranks import RankEnvironment
from speech import TINY

# the place -> where it is, and at which call; DDP rebuilds its buckets before the second forward
PLACES = {
    "set-up": (setup, "make_optimizer", 1),
    "DDP's own collectives": (setup, "DistributedDataParallel", 1),
    "bucket rebuild": (DistributedDataParallel, "_pre_forward", 2),
    "validation": (loop, "validate_run", 1),
    "checkpoint": (checkpoint, "_write_all", 1),
}


def main(rank: int, size: int, port: int, settings: dict, where: str, how: str, path: str) -> None:
    """Train as one of `size` ranks; the last of them dies, stops or breaks at `where`."""
    with open(path, "w", buffering=1) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        if rank == size - 1 and where:
            lose(*PLACES[where], how)
        config = make_config(**(TINY | {"name": "lost", "timeout": 6.0} | settings))
        try:
            sys.exit(
                run.run_worker(config, RankEnvironment("test", rank, size, rank, size), False, [])
            )
        except (RunError, ExchangeError, LaunchError) as error:  # as the command line does
            sys.exit(f"{type(error).__name__}: {error}")


def lose(owner: object, name: str, at: int, how: str) -> None:
    whole, calls = getattr(owner, name), [0]

    def losing(*args, **more):
        calls[0] += 1
        if calls[0] == at and how == "breaks":
            raise ValueError("it broke here")
        if calls[0] == at:
            os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[how])
        return whole(*args, **more)

    setattr(owner, name, losing)
