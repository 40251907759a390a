"""Where this process stands among the others, whichever launcher started it."""

from __future__ import annotations

import os
from dataclasses import dataclass

# launcher -> the variables that hold (rank, size)
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """One of `size` processes, as the launcher numbers them."""

    launcher: str
    rank: int
    size: int


def find_place() -> Place | None:
    """This process's place from the environment; None when no launcher started it."""
    for launcher, (rank, size) in LAUNCHERS.items():
        if rank in os.environ and size in os.environ:
            return Place(launcher, int(os.environ[rank]), int(os.environ[size]))
    return None


def meeting_point(place: Place) -> str:
    """Where the ranks meet. Launchers other than torchrun do not say, so the user must."""
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise ValueError(
            f"rank {place.rank} of {place.size}, started by {place.launcher}: set MASTER_ADDR and "
            "MASTER_PORT to a host and a free port that every rank can reach"
        )
    return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
