# SPDX-License-Identifier: Apache-2.0
"""Host and port of the job's store: from MASTER_ADDR and MASTER_PORT, or derived from the job."""

from __future__ import annotations

import os
import re
from zlib import crc32

from oktopk.errors import LaunchError
from oktopk.launch.rank_environment import RankEnvironment, pbs_hosts
from oktopk.utils.files import single_line

# launcher -> variables that are the same on all ranks of a job and differ between jobs on a host
JOB_IDS = {
    "mpirun": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "mpiexec": ("PBS_JOBID", "SLURM_JOB_ID"),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    "pbsdsh": ("PBS_JOBID",),
}
# the steps that mpirun makes leave the first host out, so only srun reads the list of the step
NODE_LISTS = {"srun": ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "": ("SLURM_JOB_NODELIST",)}
# below the ports that systems give to outgoing connections
PORTS = range(20_000, 32_000)


def master_endpoint(env: RankEnvironment) -> tuple[str, int]:
    """Return host and port of the job's store; LaunchError says which variable to set."""
    given = {"MASTER_ADDR", "MASTER_PORT"} & set(os.environ)
    if env.launcher not in JOB_IDS and len(given) < 2:
        raise LaunchError(f"{env}: set MASTER_ADDR and MASTER_PORT, as {env.launcher} does")
    host = os.environ.get("MASTER_ADDR") or _host(env)
    port = os.environ.get("MASTER_PORT") or str(_port(env))
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise LaunchError(
            f"MASTER_PORT={single_line(repr(port))} is not a port: set a number from 1 to 65535"
        )
    return host, int(port)


def _host(env: RankEnvironment) -> str:
    if env.on_one_host:
        return "127.0.0.1"
    for name in NODE_LISTS.get(env.launcher, NODE_LISTS[""]):
        if os.environ.get(name):
            return first_host(os.environ[name])
    if "PBS_NODEFILE" in os.environ:
        return pbs_hosts()[0]
    if env.launcher == "srun" and os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        return os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    raise LaunchError(
        f"{env}: {env.local_world_size} ranks are on this host and the others elsewhere; set "
        "MASTER_ADDR to the host of rank 0 for all of them (mpirun: -x MASTER_ADDR=HOST)"
    )


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM list: node01 for `node[01-03,7],other`."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+", nodelist)
    if first is None or nodelist[first.end() :][:1] not in ("", ","):
        raise LaunchError(
            f"the SLURM node list {single_line(repr(nodelist))} cannot be read: set MASTER_ADDR"
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _port(env: RankEnvironment) -> int:
    """Return a port that all ranks of the job compute alike, and other jobs most likely do not."""
    job = [os.environ[name] for name in JOB_IDS[env.launcher] if name in os.environ]
    if not job and not env.on_one_host:
        names = " and ".join(JOB_IDS[env.launcher])
        raise LaunchError(f"{env}: without {names}, set MASTER_PORT to a free port of rank 0")
    if env.on_one_host and (not job or env.launcher == "mpiexec"):
        # the process of the launcher on this host: mpiexec has no id that tells two runs apart
        job = [str(os.getppid())]
    return PORTS[crc32(" ".join(job).encode("utf-8", "surrogateescape")) % len(PORTS)]
