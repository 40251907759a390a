# SPDX-License-Identifier: Apache-2.0
"""The outer step: how the mean weight change of all ranks moves the weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from oktopk.utils.arguments import integer, number


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

    def __post_init__(self) -> None:
        integer("every", self.every, least=1)
        integer("check_every", self.check_every, least=0)
        lr = number("outer_lr", self.outer_lr, "more than 0")
        if not 0 < lr < float("inf"):
            raise ValueError(f"outer_lr must be more than 0 and finite, got {lr}")
        momentum = number("outer_momentum", self.outer_momentum, "in [0, 1)")
        if not 0 <= momentum < 1:
            raise ValueError(f"outer_momentum must be in [0, 1), got {momentum}")


def outer_step_(
    anchor: Tensor, change: Tensor, momentum: Tensor | None, options: OuterOptions
) -> None:
    """Move the anchor by the mean change, as SGD(nesterov=True) does with a gradient (DiLoCo).

    Products and sums are rounded one by one: `add_(x, alpha=...)` may round once for both, on some
    processors only, and the ranks may have different ones. Overwrites `change`.
    """
    if momentum is not None:
        momentum.mul_(options.outer_momentum).add_(change)
        change.add_(momentum * options.outer_momentum)
    anchor.sub_(change.mul_(options.outer_lr))
