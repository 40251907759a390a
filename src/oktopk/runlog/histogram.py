# SPDX-License-Identifier: Apache-2.0
"""Magnitudes of a tensor as a histogram of few numbers, small enough for a line of JSON."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.runlog.schema import Histogram, TensorsRecord

MIN_EXPONENT, MAX_EXPONENT, BINS_PER_DECADE = -14, 6, 4
NUM_BINS = (MAX_EXPONENT - MIN_EXPONENT) * BINS_PER_DECADE
"""Bins of |x| from 1e-14 to 1e6. The outermost bins also count what lies beyond them."""


def histogram(x: Tensor) -> Histogram:
    """Count |x| in bins of equal ratio, and count the zeros. O(n), with one copy of x."""
    magnitudes = x.detach().flatten().abs()
    zeros = int((magnitudes == 0).sum())
    logs = magnitudes[magnitudes > 0].double().log10_()
    bins = ((logs - MIN_EXPONENT) * BINS_PER_DECADE).floor_().clamp_(0, NUM_BINS - 1).long()
    counts = torch.bincount(bins, minlength=NUM_BINS).tolist()
    used = [i for i, count in enumerate(counts) if count]
    first, last = (used[0], used[-1] + 1) if used else (0, 0)
    return Histogram(zeros, first, counts[first:last])


def bin_edges(first: int, num: int) -> list[float]:
    """The `num` + 1 edges of the bins from `first` on."""
    return [10 ** (MIN_EXPONENT + (first + i) / BINS_PER_DECADE) for i in range(num + 1)]


def tensors_record(
    step: int, gradients: dict[str, Tensor], residuals: dict[str, Tensor]
) -> TensorsRecord:
    """How many entries of each tensor were exchanged, and norms and histograms."""
    groups = {"gradient": gradients, "residual": residuals}
    return TensorsRecord(
        step=step,
        kept={name: int(torch.count_nonzero(grad)) for name, grad in gradients.items()},
        of={name: grad.numel() for name, grad in gradients.items()},
        spread={
            name: histogram(torch.cat([tensor.flatten() for tensor in tensors.values()]))
            for name, tensors in groups.items()
            if tensors
        },
        norm={name: grad.norm().item() for name, grad in gradients.items()},
        residual_norm={name: residual.norm().item() for name, residual in residuals.items()},
    )
