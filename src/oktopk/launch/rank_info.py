# SPDX-License-Identifier: Apache-2.0
"""What every rank knows of all ranks before the process group is made: hosts, cores and GPUs.

From it each rank chooses its device and its number of threads; all ranks choose in the same way.
"""

from __future__ import annotations

import os
import secrets
import socket
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The host of a rank, and what the rank may use of it."""

    host: str
    cores: list[int]
    gpus: list[str] = field(default_factory=list)
    """The UUIDs of the GPUs that the rank sees."""

    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """A random string by which a process recognizes its own entry."""


def local_rank_info() -> RankInfo:
    """Return the information about this process."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return RankInfo(
        host=socket.gethostname(),
        cores=sorted(os.sched_getaffinity(0)),
        gpus=[str(torch.cuda.get_device_properties(index).uuid) for index in range(num_gpus)],
    )


def choose_device(rank: int, ranks: list[RankInfo]) -> torch.device:
    """Return this rank's GPU if every rank has one of its own, else the CPU on all ranks."""
    own = [_own_gpu(each, ranks) for each in range(len(ranks))]
    places = {(info.host, gpu) for info, gpu in zip(ranks, own, strict=True)}
    mine = own[rank]
    if mine is not None and None not in own and len(places) == len(ranks):
        return torch.device("cuda", ranks[rank].gpus.index(mine))
    num_seeing = sum(bool(info.gpus) for info in ranks)
    if num_seeing and rank == 0:
        warnings.warn(
            f"{num_seeing} of {len(ranks)} ranks see a GPU, but not one each: all run on CPUs",
            stacklevel=2,
        )
    return torch.device("cpu")


def _own_gpu(rank: int, ranks: list[RankInfo]) -> str | None:
    """Return the only GPU that the launcher left visible, or the one of the rank's local number."""
    gpus = ranks[rank].gpus
    local_rank = sum(info.host == ranks[rank].host for info in ranks[:rank])
    return gpus[0] if len(gpus) == 1 else gpus[local_rank] if local_rank < len(gpus) else None


def choose_num_threads(rank: int, ranks: list[RankInfo]) -> int:
    """Return the number of cores for a rank; ranks that may use the same core share it equally."""
    mine = ranks[rank]
    on_host = [info for info in ranks if info.host == mine.host]
    num_users = Counter(core for info in on_host for core in info.cores)
    share = sum(1 / num_users[core] for core in mine.cores)
    return max(1, int(min(share, cpu_quota() / len(on_host)) + 1e-6))


def cpu_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Return how many cores this container may use, which can be fewer than it sees."""
    if not path.exists():
        return float("inf")
    limit, period = path.read_text().split()
    return float("inf") if limit == "max" else int(limit) / int(period)
