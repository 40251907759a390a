# SPDX-License-Identifier: Apache-2.0
"""The environments that launchers leave to a rank, and ranks started with them."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import TorchTransport
from oktopk.errors import LaunchError
from oktopk.launch.ranks import read_rank_environment
from oktopk.launch.rendezvous import job_process_group

PREFIXES = ("OKTOPK_", "OMPI_", "PMI", "MPI_", "SLURM_", "PBS_", "MASTER_", "TORCHELASTIC_")


NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"}


def environment(**variables: str) -> dict[str, str]:
    """This one, without what a launcher may have left in it."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(PREFIXES)}
    return {name: value for name, value in kept.items() if name not in NAMES} | variables


def srun(rank: int, size: int, **more: object) -> dict[str, str]:
    step = {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size, "SLURM_LOCALID": rank}
    step |= {"SLURM_STEP_TASKS_PER_NODE": size, "SLURM_NODEID": 0, "SLURM_JOB_ID": 71}
    return {name: str(value) for name, value in (step | more).items()}


def pbs(rank: int, nodefile: Path, **more: object) -> dict[str, str]:
    task = {"PBS_VNODENUM": rank, "PBS_TASKNUM": rank + 2, "PBS_NODEFILE": nodefile}
    return {name: str(value) for name, value in (task | {"PBS_JOBID": "9.head"} | more).items()}


def openmpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def start(target, *args: object) -> mp.Process:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numba", "oktopk", "worlds"])
    process = context.Process(target=target, args=args)
    process.start()
    return process


def rank_main(variables: dict[str, str], timeout: float, folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment(**variables))
    env = read_rank_environment()
    try:
        with job_process_group(env, timeout) as device:
            comm = Comm(TorchTransport())
            ranks = comm.all_gather_header(torch.tensor([env.rank]), stage="test").view(-1).tolist()
            said = f"{env.launcher} {ranks} {dist.get_backend()} on {device}"
        assert not dist.is_initialized()
    except LaunchError as error:
        said = str(error)
    (folder / str(env.rank)).write_text(said)


def wait_for(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("waited 20 s in vain")
