"""Where this process stands among the others, whichever launcher started it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from oktopk.errors import LaunchError
from oktopk.utils.files import FileError, one_line, read_text


@dataclass(frozen=True, slots=True)
class Place:
    """One of `size` processes, as the launcher numbers them; local: among those of this host."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}, started by {self.launcher}"


@dataclass(frozen=True, slots=True)
class Names:
    """The variables that hold a place; of several names the first that is set counts."""

    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


# The inner launcher comes first: torchrun may run under srun, mpirun in a SLURM or PBS job.
LAUNCHERS = {
    "oktopk": Names(("OKTOPK_RANK",), ("OKTOPK_SIZE",), ("OKTOPK_RANK",), ("OKTOPK_SIZE",)),
    "torchrun": Names(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    "mpirun": Names(
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # MPICH and Intel MPI, Cray's, and srun --mpi=pmi2
    "mpiexec": Names(
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
    ),
    # SLURM_STEP_*: a batch script has SLURM_PROCID=0 and SLURM_NTASKS too, and is no rank
    "srun": Names(
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
    ),
}
RANK_MEANS_NOTHING_ALONE = {"srun"}
NUMBER = "[0-9]{1,7}"
"""A rank or a number of ranks: no job has ten million."""


def find_place() -> Place | None:
    """This process's place from the environment; None when no launcher started it."""
    for launcher, names in LAUNCHERS.items():
        if _is_set(names.size) or (
            _is_set(names.rank) and launcher not in RANK_MEANS_NOTHING_ALONE
        ):
            return _checked(_from_names(launcher, names))
    return _from_pbsdsh()


def _is_set(names: tuple[str, ...]) -> bool:
    return any(name in os.environ for name in names)


def _from_names(launcher: str, names: Names) -> Place:
    rank, size = _number(launcher, names.rank), _number(launcher, names.size)
    if launcher == "torchrun" and not _is_set(names.local_rank + names.local_size):
        return Place(launcher, rank, size, 0, 1)  # operators that start one process per pod
    here = _number(launcher, names.local_rank), _number(launcher, names.local_size)
    return Place(launcher, rank, size, *here)


def _number(launcher: str, names: tuple[str, ...]) -> int:
    """The value of the first name that is set; of SLURM's `4(x2),3` the part of this node."""
    name = next((name for name in names if name in os.environ), None)
    if name is None:
        raise LaunchError(
            f"the environment looks like {launcher}'s, but {' or '.join(names)} is not set: "
            f"set it, or unset the variables of {launcher} if it did not start this process"
        )
    text = os.environ[name]
    if re.fullmatch(NUMBER, text):
        return int(text)
    count = _of_this_node(text) if name == "SLURM_STEP_TASKS_PER_NODE" else None
    if count is None:
        raise LaunchError(
            f"{name}={one_line(repr(text))} is not a number, as {launcher} would have set it"
        )
    return count


def _of_this_node(text: str) -> int | None:
    """The part of this node in SLURM's `4(x2),3`; None where the text is something else."""
    part = rf"({NUMBER})(?:\(x({NUMBER})\))?"
    node = os.environ.get("SLURM_NODEID", "")
    if not re.fullmatch(f"{part}(?:,{part})*", text) or not re.fullmatch(NUMBER, node):
        return None
    nodes = 0  # counted, not listed: there may be millions
    for count, times in re.findall(part, text):
        nodes += int(times or 1)
        if int(node) < nodes:
            return int(count)
    return None


def _from_pbsdsh() -> Place | None:
    """A task of pbsdsh. Its rank is a line of PBS_NODEFILE; the job script itself is no rank."""
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
    here = hosts[rank]
    return Place("pbsdsh", rank, len(hosts), hosts[:rank].count(here), hosts.count(here))


def pbs_hosts() -> list[str]:
    """The hosts of the PBS job, one per process."""
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


def _checked(place: Place) -> Place:
    names = LAUNCHERS[place.launcher]
    for rank, size, of in (
        (place.rank, place.size, (names.rank, names.size)),
        (place.local_rank, place.local_size, (names.local_rank, names.local_size)),
        (place.local_size - 1, place.size, (names.local_size, names.size)),
    ):
        if rank >= size:
            told = ", ".join(
                f"{name}={one_line(os.environ[name])}"
                for some in of
                for name in some
                if name in os.environ
            )
            raise LaunchError(f"{place.launcher} left {told}, which cannot be: mixed environments?")
    return place
