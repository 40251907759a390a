"""How values spread over magnitudes, in few numbers: what a histogram in a journal needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOWEST, HIGHEST, PER_DECADE = -14, 6, 4
NUM = (HIGHEST - LOWEST) * PER_DECADE
"""Bins of |x| from 1e-14 to 1e6, four a decade; what lies beyond is in the outermost ones."""


def spread(x: Tensor) -> dict[str, Any]:
    """Counts of |x| by bins of equal ratio, and of zeros. O(n), one copy of x."""
    magnitudes = x.detach().flatten().abs()
    zeros = int((magnitudes == 0).sum())
    logs = magnitudes[magnitudes > 0].double().log10_()
    bins = ((logs - LOWEST) * PER_DECADE).floor_().clamp_(0, NUM - 1).long()
    counts = torch.bincount(bins, minlength=NUM).tolist()
    used = [i for i, count in enumerate(counts) if count]
    first, last = (used[0], used[-1] + 1) if used else (0, 0)
    return {"zeros": zeros, "first": first, "counts": counts[first:last]}


def edges(first: int, num: int) -> list[float]:
    """The num + 1 edges of bins from `first` on."""
    return [10 ** (LOWEST + (first + i) / PER_DECADE) for i in range(num + 1)]
