# SPDX-License-Identifier: Apache-2.0
"""Synthetic gradients. They are made once, so that a step takes no time to generate them.

Real gradients have large entries at the same places for many steps and on many ranks, tensors of
very different scale, and tails far heavier than those of a normal distribution. So every tensor and
every entry has a scale that is the same on all ranks, times a random number that is in part the
same on all ranks and in part each rank's own.
"""

from __future__ import annotations

import math
from itertools import cycle

import torch
from torch import Tensor, nn

from oktopk.bench.shapes import Shapes

VARIANTS = 3  # different gradients, taken in turn
SHARED = (
    0.5  # the part that is the same on all ranks: an entry of the result then comes from few ranks
)


class Stream(nn.Module):
    """A model with given gradients. Its forward pass takes no time."""

    def __init__(self, shapes: Shapes, rank: int, variants: int = VARIANTS) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(shape) for shape in shapes])
        self.numels = [math.prod(shape) for shape in shapes]
        self.numel = sum(self.numels)
        self.shapes = shapes
        self._variants = cycle(gradients(self.numels, rank, variants))

    def forward(self) -> Tensor:
        return _Known.apply(next(self._variants), *self.parts)


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx, flat, *parameters):  # noqa: ANN001, ANN002, ANN205 - torch's signature
        ctx.flat, ctx.shapes = flat, [parameter.shape for parameter in parameters]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, *_):  # noqa: ANN001, ANN002, ANN205 - torch's signature
        parts = ctx.flat.split([shape.numel() for shape in ctx.shapes])
        views = [part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True)]
        return None, *views


def gradients(numels: list[int], rank: int, variants: int) -> list[Tensor]:
    """Return flat gradients of one rank, the same for the same arguments. O(variants * n)."""
    common = torch.Generator().manual_seed(1)
    own = torch.Generator().manual_seed(1000 + rank)
    numel = sum(numels)
    scale = torch.randn(numel, generator=common).exp_()
    for part, factor in zip(
        scale.split(numels), torch.randn(len(numels), generator=common).exp(), strict=True
    ):
        part.mul_(factor * 1e-3)
    made = []
    for _ in range(variants):
        flat = torch.randn(numel, generator=common).mul_(SHARED)
        made.append(flat.add_(torch.randn(numel, generator=own)).mul_(scale))
    return made
