"""Memory of this process and its GPU, in bytes."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

FIELDS = ("rss", "rss_peak", "gpu_allocated", "gpu_allocated_peak", "gpu_reserved")


def memory(device: torch.device) -> dict[str, int]:
    """Resident memory now and at its peak; of the GPU too, 0 where there is none."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    statm = Path("/proc/self/statm")  # Linux; elsewhere only the peak is known
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    usage = [now, max(now, peak)]
    if device.type == "cuda":
        usage.append(torch.cuda.memory_allocated(device))
        usage.append(torch.cuda.max_memory_allocated(device))
        usage.append(torch.cuda.memory_reserved(device))
    return dict(zip(FIELDS, usage + [0] * (len(FIELDS) - len(usage)), strict=True))
