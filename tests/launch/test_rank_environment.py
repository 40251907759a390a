# SPDX-License-Identifier: Apache-2.0
"""Ranks from the environments that launchers set."""

from __future__ import annotations

import os

import pytest

from launchers import openmpi, pbs, srun
from oktopk.errors import LaunchError
from oktopk.launch.ranks import RankEnvironment, master_endpoint, read_rank_environment


@pytest.fixture
def nodefile(tmp_path):
    path = tmp_path / "nodes"
    path.write_text("gpu1\n" * 4 + "gpu2\n" * 4)
    return path


def test_a_process_without_launcher_has_no_rank(environ):
    assert read_rank_environment() is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"OKTOPK_RANK": 1, "OKTOPK_SIZE": 3, "RANK": 0}, RankEnvironment("oktopk", 1, 3, 1, 3)),
        (
            {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4} | srun(1, 2),
            RankEnvironment("torchrun", 5, 8, 1, 4),
        ),
        ({"RANK": 1, "WORLD_SIZE": 2}, RankEnvironment("torchrun", 1, 2, 0, 1)),
        (openmpi(6, 8, 2, 4) | srun(0, 1), RankEnvironment("mpirun", 6, 8, 2, 4)),
        (
            {"PMI_RANK": 3, "PMI_SIZE": 4, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2},
            RankEnvironment("mpiexec", 3, 4, 1, 2),
        ),
        ({"PMI_RANK": 1, "PMI_SIZE": 2} | srun(1, 2), RankEnvironment("mpiexec", 1, 2, 1, 2)),
        (srun(1, 2), RankEnvironment("srun", 1, 2, 1, 2)),
        (
            srun(9, 11, SLURM_NODEID=2, SLURM_LOCALID=1, SLURM_STEP_TASKS_PER_NODE="4(x2),3"),
            RankEnvironment("srun", 9, 11, 1, 3),
        ),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 8, "SLURM_LOCALID": 0}, None),
    ],
)
def test_the_rank_is_read_from_the_variables_of_every_launcher(environ, variables, expected):
    environ(**variables)
    assert read_rank_environment() == expected


def test_pbsdsh_numbers_the_lines_of_the_nodefile(environ, nodefile):
    environ(**pbs(6, nodefile))
    assert read_rank_environment() == RankEnvironment("pbsdsh", 6, 8, 2, 4)
    assert master_endpoint(read_rank_environment())[0] == "gpu1"
    environ(**pbs(0, nodefile, PBS_TASKNUM=1))
    assert read_rank_environment() is None, "the job script itself is not a rank"


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"RANK": 1}, "WORLD_SIZE is not set"),
        ({"RANK": "one", "WORLD_SIZE": 2}, "RANK='one' is not a number"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2, WORLD_SIZE=2, which is impossible"),
        ({"PMI_RANK": 0, "PMI_SIZE": 2}, "MPI_LOCALRANKID or PMI_LOCAL_RANK or SLURM_LOCALID is"),
        (openmpi(1, 2, 1, 4), "LOCAL_SIZE=4, OMPI_COMM_WORLD_SIZE=2, which is impossible"),
        (srun(0, 4, SLURM_STEP_TASKS_PER_NODE="2(x2", SLURM_NODEID=3), "'2(x2' is not a number"),
        ({"PBS_VNODENUM": 3, "PBS_NODEFILE": "/nowhere"}, "PBS_NODEFILE=/nowhere cannot be read"),
    ],
)
def test_wrong_variables_are_named(environ, variables, complaint):
    environ(**variables)
    with pytest.raises(LaunchError) as caught:
        read_rank_environment()
    assert complaint in str(caught.value)


def test_pbsdsh_by_host_needs_one_line_per_host(environ, nodefile):
    environ(**pbs(0, nodefile), PBS_NODENUM=1)
    del os.environ["PBS_VNODENUM"]
    with pytest.raises(LaunchError, match="several lines per host"):
        read_rank_environment()
