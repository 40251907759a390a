# SPDX-License-Identifier: Apache-2.0
"""Memory of this process and its GPU."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from oktopk.runlog.schema import RankMemory


def memory_usage(device: torch.device) -> RankMemory:
    """Resident memory now and at its peak, and the GPU's; 0 where there is no GPU."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    statm = Path("/proc/self/statm")  # on Linux; elsewhere only the peak is known
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    gpu = (0, 0, 0)
    if device.type == "cuda":
        gpu = (
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
            torch.cuda.memory_reserved(device),
        )
    return RankMemory(now, max(now, peak), *gpu)
