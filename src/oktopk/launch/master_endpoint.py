"""Where the ranks meet: torchrun says so, for the others it follows from the job."""

from __future__ import annotations

import os
import re
from zlib import crc32

from oktopk.errors import LaunchError
from oktopk.launch.rank_environment import Place, pbs_hosts
from oktopk.utils.files import one_line

# launcher -> what all ranks of one job have alike, and other jobs on the host have not
JOB_IDS = {
    "mpirun": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "mpiexec": ("PBS_JOBID", "SLURM_JOB_ID"),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    "pbsdsh": ("PBS_JOBID",),
}
# mpirun's own steps leave the first host out, so only srun looks at the step
NODE_LISTS = {"srun": ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "": ("SLURM_JOB_NODELIST",)}
# below the ports that systems give to outgoing connections
PORTS = range(20_000, 32_000)


def meeting_point(place: Place) -> tuple[str, int]:
    """Host and port of the store of the job: MASTER_ADDR and MASTER_PORT, or derived."""
    told = {"MASTER_ADDR", "MASTER_PORT"} & set(os.environ)
    if place.launcher not in JOB_IDS and len(told) < 2:
        raise LaunchError(f"{place}: set MASTER_ADDR and MASTER_PORT, as {place.launcher} does")
    host = os.environ.get("MASTER_ADDR") or _host(place)
    port = os.environ.get("MASTER_PORT") or str(_port(place))
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise LaunchError(
            f"MASTER_PORT={one_line(repr(port))} is not a port: set a number from 1 to 65535"
        )
    return host, int(port)


def _host(place: Place) -> str:
    if place.local_size == place.size:
        return "127.0.0.1"
    for name in NODE_LISTS.get(place.launcher, NODE_LISTS[""]):
        if os.environ.get(name):
            return first_host(os.environ[name])
    if "PBS_NODEFILE" in os.environ:
        return pbs_hosts()[0]
    if place.launcher == "srun" and os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        return os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    raise LaunchError(
        f"{place}: {place.local_size} ranks are on this host and the others elsewhere; set "
        "MASTER_ADDR to the host of rank 0 for all of them (mpirun: -x MASTER_ADDR=HOST)"
    )


def first_host(nodelist: str) -> str:
    """The first host of a SLURM list: node01 of `node[01-03,7],other`."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+", nodelist)
    if first is None or nodelist[first.end() :][:1] not in ("", ","):
        raise LaunchError(
            f"the SLURM node list {one_line(repr(nodelist))} cannot be read: set MASTER_ADDR"
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _port(place: Place) -> int:
    job = [os.environ[name] for name in JOB_IDS[place.launcher] if name in os.environ]
    one_host = place.local_size == place.size
    if not job and not one_host:
        names = " and ".join(JOB_IDS[place.launcher])
        raise LaunchError(f"{place}: without {names}, set MASTER_PORT to a free port of rank 0")
    if one_host and (not job or place.launcher == "mpiexec"):
        job = [str(os.getppid())]  # the launcher's helper on this host; mpiexec has no id of a run
    return PORTS[crc32(" ".join(job).encode("utf-8", "surrogateescape")) % len(PORTS)]
