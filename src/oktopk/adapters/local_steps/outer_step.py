# SPDX-License-Identifier: Apache-2.0
"""The outer step: how the mean weight change of all ranks moves the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk.utils.arguments import integer, number

SHARED_METHOD = "topkdsa"
"""What `method="auto"` exchanges by: it delivers all that any rank has selected, by the owners of
regions, and the ranks share the density. The largest weight changes of different ranks are at
different places: 4 ranks found 3.5 to 3.9 times as many as one rank selects (docs/experiments.md).
`oktopk` keeps the k largest sums of k entries from each rank, so most of what was sent would return
to the residuals. Here each rank selects k/P entries and all of them arrive: the bytes still hardly
grow with the number of ranks, and none of them are wasted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterOptions:
    """Options of `local_steps` beside `Settings`."""

    every: int
    """Optimizer steps between two exchanges."""

    outer_lr: float = 1.0
    """Learning rate of the outer step."""

    outer_momentum: float = 0.0
    """Nesterov momentum of the outer step; 0 is none."""

    check_every: int = 10
    """Exchanges between comparisons of the weights of all ranks; 0 is never."""

    delay: int = 0
    """Optimizer steps from the launch of an exchange until its result is applied; 0 is at once."""

    mixing: float = 1.0
    """Share of this rank's moves since the launch that is kept when the result is applied."""

    fragments: int = 1
    """Parts of the model that are exchanged one after the other."""

    def __post_init__(self) -> None:
        integer("every", self.every, least=1)
        self._check_streaming()
        integer("check_every", self.check_every, least=0)
        lr = number("outer_lr", self.outer_lr, "more than 0")
        if not 0 < lr < float("inf"):
            raise ValueError(f"outer_lr must be more than 0 and finite, got {lr}")
        momentum = number("outer_momentum", self.outer_momentum, "in [0, 1)")
        if not 0 <= momentum < 1:
            raise ValueError(f"outer_momentum must be in [0, 1), got {momentum}")

    def _check_streaming(self) -> None:
        if integer("delay", self.delay, least=0) >= self.every:
            raise ValueError(f"delay must be less than every={self.every}, got {self.delay}")
        mixing = number("mixing", self.mixing, "in [0, 1]")
        if not 0 <= mixing <= 1:
            raise ValueError(f"mixing must be in [0, 1], got {mixing}")
        if mixing != 1 and not self.delay:
            raise ValueError(f"mixing={mixing} has no effect with delay=0: set a delay")
        if integer("fragments", self.fragments, least=1) > self.every:
            raise ValueError(f"fragments must be at most every={self.every}, got {self.fragments}")


def outer_step(
    anchor: Tensor, change: Tensor, momentum: Tensor | None, options: OuterOptions
) -> tuple[Tensor, Tensor | None]:
    """The anchor moved by the mean change, as SGD(nesterov=True) does with a gradient (DiLoCo), and
    the momentum after it.

    Products and sums are rounded one by one: `add_(x, alpha=...)` may round once for both, on some
    processors only, and the ranks may have different ones. The new anchor is in the memory of
    `change`; the old anchor and the old momentum are left as they were.
    """
    if momentum is not None:
        momentum = (momentum * options.outer_momentum).add_(change)
        change.add_(momentum * options.outer_momentum)
    return torch.sub(anchor, change.mul_(options.outer_lr), out=change), momentum


def landed(anchor: Tensor, now: Tensor, launched: Tensor, mixing: float) -> Tensor:
    """The weights after a delayed exchange: the new anchor, and on top what this rank has moved
    since the launch. In the dtype of the anchor; without a move they are the anchor, to the bit."""
    moves = now.to(anchor.dtype) - launched.to(anchor.dtype)
    return anchor + moves.mul_(mixing)
