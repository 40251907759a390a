# SPDX-License-Identifier: Apache-2.0
"""Several launchers, simulated by their variables: their ranks make a process group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from launchers import pbs, rank_main, srun, start
from oktopk.launch.rendezvous import job_process_group


def results_of(ranks: list[dict[str, str]], folder: Path, timeout: float = 30.0) -> list[str]:
    processes = [start(rank_main, variables, timeout, folder) for variables in ranks]
    for process in processes:
        process.join(60)
        process.kill()
    return [path.read_text() for path in sorted(folder.iterdir())]


def simulated(launcher: str, folder: Path) -> list[dict[str, str]]:
    nodefile = folder.parent / "one-host"
    nodefile.write_text("here\n" * 3)
    job = f"{os.getpid()}.{folder.parent.name}"
    hydra = {"PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}
    return {
        "srun": [srun(rank, 3, SLURM_JOB_ID=job) for rank in range(3)],
        "pbsdsh": [pbs(rank, nodefile, PBS_JOBID=job) for rank in range(3)],
        "mpiexec": [
            hydra | {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)} for rank in range(3)
        ],
    }[launcher]


@pytest.mark.parametrize("launcher", ["srun", "pbsdsh", "mpiexec"])
def test_ranks_of_every_launcher_make_a_group(launcher, tmp_path):
    folder = tmp_path / "said"
    folder.mkdir()
    said = results_of(simulated(launcher, folder), folder)
    assert said == [f"{launcher} [0, 1, 2] gloo on cpu"] * 3


def test_ranks_that_do_not_register_are_named(tmp_path):
    folder = tmp_path / "said"
    folder.mkdir()
    said = results_of(simulated("srun", folder)[:2], folder, timeout=2.0)
    assert said == [
        f"rank {rank} of 3, started by srun: ranks [2] did not register within 2 s"
        for rank in (0, 1)
    ]


def test_without_rank_0_the_endpoint_is_named(tmp_path):
    folder = tmp_path / "said"
    folder.mkdir()
    (said,) = results_of([srun(1, 2, MASTER_PORT=1)], folder, timeout=0.5)
    assert said.startswith(
        "rank 1 of 2, started by srun: no process listens at 127.0.0.1:1 after 0.5"
    )


def test_an_error_in_the_block_is_raised_and_the_group_destroyed(environ):
    with pytest.raises(ZeroDivisionError), job_process_group(None, 10):
        assert dist.get_world_size() == 1
        _ = 1 / 0
    assert not dist.is_initialized()
