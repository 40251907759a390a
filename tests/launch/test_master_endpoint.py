# SPDX-License-Identifier: Apache-2.0
"""Host and port of the job's store, derived from the job."""

from __future__ import annotations

import pytest

from launchers import openmpi, srun
from oktopk.errors import LaunchError
from oktopk.launch.ranks import PORTS, first_host, master_endpoint, read_rank_environment


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node[01-03,7],other5", "node01"),
        ("login", "login"),
        ("a[7,9]b[3-4]-x,c", "a7b3-x"),
        ("gnode[10,20,25,37]", "gnode10"),
    ],
)
def test_first_host_of_a_slurm_list(nodelist, first):
    assert first_host(nodelist) == first


@pytest.mark.parametrize("nodelist", ["", "node[01-03", "[]", "a]b"])
def test_a_text_that_is_not_a_slurm_list(nodelist):
    with pytest.raises(LaunchError, match="set MASTER_ADDR"):
        first_host(nodelist)


def test_endpoints_follow_from_the_job(environ):
    hosts = {"SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_NODELIST": "n[1-4]"}
    endpoints = []
    for rank, job in ((0, 71), (3, 71), (3, 72)):
        step = srun(rank, 4, SLURM_STEP_TASKS_PER_NODE="2(x2)", SLURM_LOCALID=rank % 2)
        environ(**step | {"SLURM_NODEID": rank // 2, "SLURM_JOB_ID": job} | hosts)
        endpoints.append(master_endpoint(read_rank_environment()))
    assert endpoints[0] == endpoints[1]
    assert endpoints[0][0] == "n3" and endpoints[0][1] in PORTS
    assert endpoints[2][1] != endpoints[0][1], "two jobs on a host must not share a port"


def test_what_the_user_set_counts_more(environ):
    environ(**srun(0, 2), MASTER_ADDR="head", MASTER_PORT=1234)
    assert master_endpoint(read_rank_environment()) == ("head", 1234)
    environ(**srun(0, 2), MASTER_PORT="12e4")
    with pytest.raises(LaunchError, match="MASTER_PORT='12e4' is not a port"):
        master_endpoint(read_rank_environment())


def test_mpirun_on_several_hosts_needs_an_address(environ):
    environ(**openmpi(0, 4, 0, 2))
    with pytest.raises(LaunchError, match="-x MASTER_ADDR=HOST"):
        master_endpoint(read_rank_environment())
