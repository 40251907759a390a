# SPDX-License-Identifier: Apache-2.0
"""Gradients of every kind, the same for the same (kind, rank, step) wherever they are made."""

from __future__ import annotations

import torch
from torch import Tensor


def _generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * rank + step)


def gaussian(n: int, rank: int, step: int) -> Tensor:
    return torch.randn(n, generator=_generator(rank, step), dtype=torch.float64)


def laplace(n: int, rank: int, step: int) -> Tensor:
    uniform = torch.rand(n, generator=_generator(rank, step), dtype=torch.float64) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.4999999))


def heavy(n: int, rank: int, step: int) -> Tensor:
    """Student t with 3 degrees of freedom, wider for some coordinates than for others."""
    g = _generator(rank, step)
    normal = torch.randn(4, n, generator=g, dtype=torch.float64)
    t = normal[0] / (normal[1:].square().mean(0)).sqrt()
    return t * torch.logspace(-2, 0, n, dtype=torch.float64)


def drifting(n: int, rank: int, step: int) -> Tensor:
    """Scale falls by half every 50 steps and the large coordinates wander."""
    centre = (step * n // 300) % max(n, 1)
    place = (torch.arange(n, dtype=torch.float64) - centre).abs() / max(n, 1)
    return gaussian(n, rank, step) * 0.5 ** (step / 50) * (0.05 + torch.exp(-8 * place))


def whole(n: int, rank: int, step: int) -> Tensor:
    """Whole numbers: float64 sums of them are exact, so conservation can be checked to the bit."""
    return torch.randint(
        -(10**6), 10**6, (n,), generator=_generator(rank, step), dtype=torch.int64
    ).double()


def skewed(n: int, rank: int, step: int) -> Tensor:
    """All mass in one narrow range, another one every 20 steps."""
    grad = gaussian(n, rank, step) * 1e-6
    start = (step // 20 * n // 3) % max(n, 1)
    width = max(n // 30, 1)
    grad[start : start + width] *= 1e6
    return grad


def cancelling(n: int, rank: int, step: int) -> Tensor:
    """The largest entries of even and odd ranks cancel exactly; the rest comes later."""
    grad = gaussian(n, rank, step)
    if step == 0:
        grad[: n // 10] = 100.0 * (-1) ** rank
    return grad


def apart(n: int, rank: int, step: int) -> Tensor:
    """Rank 0 has its mass in the upper half, the others more of it in the lower one."""
    grad = gaussian(n, rank, step) * 1e-6
    half = slice(n // 2, n) if rank == 0 else slice(0, n // 2)
    grad[half] *= 1e6 if rank == 0 else 3e6
    return grad


def zeros(n: int, rank: int, step: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float64)


def ties(n: int, rank: int, step: int) -> Tensor:
    """Every magnitude is 1."""
    return gaussian(n, rank, step).sign()


def some_ranks_empty(n: int, rank: int, step: int) -> Tensor:
    return gaussian(n, rank, step) if (rank + step) % 2 else zeros(n, rank, step)


def jumping(n: int, rank: int, step: int) -> Tensor:
    """Scale jumps by 1000 either way every 7 steps, with a dead step before each jump up."""
    if step % 14 == 6:
        return zeros(n, rank, step)
    return gaussian(n, rank, step) * (1000.0 if step // 7 % 2 else 1.0)


STREAMS = {
    f.__name__: f
    for f in (
        gaussian,
        laplace,
        heavy,
        drifting,
        whole,
        skewed,
        cancelling,
        apart,
        zeros,
        ties,
        some_ranks_empty,
        jumping,
    )
}
