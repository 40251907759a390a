# SPDX-License-Identifier: Apache-2.0
"""The rank and world size of this process, and the endpoint of the job, from the variables
of launchers.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from oktopk.errors import LaunchError
from oktopk.utils.files import FileError, read_text, single_line

# The rank and world size of this process, read from the variables that launchers set.


LOCAL_LAUNCHER = "oktopk"
"""The launcher of workers that a command of ours has started on this machine."""


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """The number of this process among those of the job, as its launcher counts them."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    """The number among the processes on this host."""

    local_world_size: int
    """How many processes of the job are on this host."""

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks of the job are on this host."""
        return self.local_world_size == self.world_size

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, started by {self.launcher}"


SINGLE_RANK = RankEnvironment("nobody", 0, 1, 0, 1)
"""A process that no launcher started: a job of one rank."""


@dataclass(frozen=True, slots=True)
class LauncherVariables:
    """The environment variables of a launcher; of several names, the first that is set counts."""

    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]


# The inner launcher comes first: torchrun may run under srun, mpirun in a SLURM or PBS job.
LAUNCHERS = {
    LOCAL_LAUNCHER: LauncherVariables(
        ("OKTOPK_RANK",), ("OKTOPK_SIZE",), ("OKTOPK_RANK",), ("OKTOPK_SIZE",)
    ),
    "torchrun": LauncherVariables(
        ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)
    ),
    "mpirun": LauncherVariables(
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # MPICH and Intel MPI, Cray's, and srun --mpi=pmi2
    "mpiexec": LauncherVariables(
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
    ),
    # SLURM_STEP_*: a batch script has SLURM_PROCID=0 and SLURM_NTASKS too, but is not a rank
    "srun": LauncherVariables(
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
    ),
}
NEEDS_WORLD_SIZE = {"srun"}
"""Launchers whose rank variable is also set in processes that are not ranks."""
NUMBER = "[0-9]{1,7}"
"""A rank or a number of ranks: no job has ten million."""


def read_rank_environment() -> RankEnvironment | None:
    """Return the rank of this process; None when no launcher started it.

    Raises LaunchError if the variables of a launcher are incomplete or contradict each other.
    """
    launcher = launcher_of_this_process()
    if launcher is not None:
        return _checked(_from_variables(launcher, LAUNCHERS[launcher]))
    return _from_pbsdsh()


def launcher_of_this_process() -> str | None:
    """Return the launcher whose variables are set, right or wrong; pbsdsh has none of its own."""
    for launcher, variables in LAUNCHERS.items():
        if _any_set(variables.world_size) or (
            _any_set(variables.rank) and launcher not in NEEDS_WORLD_SIZE
        ):
            return launcher
    return None


def _any_set(names: tuple[str, ...]) -> bool:
    return any(name in os.environ for name in names)


def _from_variables(launcher: str, variables: LauncherVariables) -> RankEnvironment:
    rank = _number(launcher, variables.rank)
    world_size = _number(launcher, variables.world_size)
    if launcher == "torchrun" and not _any_set(variables.local_rank + variables.local_world_size):
        # Kubernetes operators that start one process per pod
        return RankEnvironment(launcher, rank, world_size, local_rank=0, local_world_size=1)
    local_rank = _number(launcher, variables.local_rank)
    local_world_size = _number(launcher, variables.local_world_size)
    return RankEnvironment(launcher, rank, world_size, local_rank, local_world_size)


def _number(launcher: str, names: tuple[str, ...]) -> int:
    """Return the value of the first name that is set; of SLURM's `4(x2),3` this node's part."""
    name = next((name for name in names if name in os.environ), None)
    if name is None:
        raise LaunchError(
            f"the environment looks like {launcher}'s, but {' or '.join(names)} is not set: "
            f"set it, or unset the variables of {launcher} if it did not start this process"
        )
    text = os.environ[name]
    if re.fullmatch(NUMBER, text):
        return int(text)
    count = _tasks_of_this_node(text) if name == "SLURM_STEP_TASKS_PER_NODE" else None
    if count is None:
        raise LaunchError(
            f"{name}={single_line(repr(text))} is not a number, as {launcher} would have set it"
        )
    return count


def _tasks_of_this_node(text: str) -> int | None:
    """Return this node's part of SLURM's `4(x2),3`; None where the text is something else."""
    part = rf"({NUMBER})(?:\(x({NUMBER})\))?"
    node = os.environ.get("SLURM_NODEID", "")
    if not re.fullmatch(f"{part}(?:,{part})*", text) or not re.fullmatch(NUMBER, node):
        return None
    num_nodes = 0  # counted, not listed: there may be millions
    for count, times in re.findall(part, text):
        num_nodes += int(times or 1)
        if int(node) < num_nodes:
            return int(count)
    return None


def _from_pbsdsh() -> RankEnvironment | None:
    """Return the rank of a task of pbsdsh, which is a line of PBS_NODEFILE.

    None for any other process; the job script itself is not a rank.
    """
    name = next((name for name in ("PBS_VNODENUM", "PBS_NODENUM") if name in os.environ), None)
    if name is None or "PBS_NODEFILE" not in os.environ:
        return None
    rank = _number("pbsdsh", (name,))
    if rank == 0 and os.environ.get("PBS_TASKNUM", "1").lstrip("0") == "1":
        return None
    hosts = pbs_hosts()
    if name == "PBS_NODENUM" and len(set(hosts)) < len(hosts):
        raise LaunchError(
            f"{name}={rank} names a host, but PBS_NODEFILE={os.environ['PBS_NODEFILE']} has "
            "several lines per host: ask for mpiprocs=1, or start with mpiexec or torchrun"
        )
    if rank >= len(hosts):
        raise LaunchError(f"{name}={rank}, but PBS_NODEFILE has {len(hosts)} lines")
    host = hosts[rank]
    return RankEnvironment("pbsdsh", rank, len(hosts), hosts[:rank].count(host), hosts.count(host))


def pbs_hosts() -> list[str]:
    """Return the hosts of the PBS job, one per process."""
    path = Path(os.environ["PBS_NODEFILE"])
    try:
        hosts = read_text(path).split()
    except FileError as error:
        raise LaunchError(
            f"PBS_NODEFILE={path} cannot be read on this host ({error}): start with mpiexec or "
            "torchrun, and set MASTER_ADDR and MASTER_PORT (jobs/pbs.sh)"
        ) from error
    if not hosts:
        raise LaunchError(f"PBS_NODEFILE={path} is empty")
    return hosts


def _checked(env: RankEnvironment) -> RankEnvironment:
    """Raise LaunchError if a number is not below the one that bounds it."""
    names = LAUNCHERS[env.launcher]
    for number, limit, variables in (
        (env.rank, env.world_size, (names.rank, names.world_size)),
        (env.local_rank, env.local_world_size, (names.local_rank, names.local_world_size)),
        (env.local_world_size - 1, env.world_size, (names.local_world_size, names.world_size)),
    ):
        if number >= limit:
            found = ", ".join(
                f"{name}={single_line(os.environ[name])}"
                for alternatives in variables
                for name in alternatives
                if name in os.environ
            )
            raise LaunchError(
                f"{env.launcher} set {found}, which is impossible: were variables of several "
                "launchers mixed?"
            )
    return env


# Host and port of the job's store: from MASTER_ADDR and MASTER_PORT, or derived from the job.


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
