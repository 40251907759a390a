# SPDX-License-Identifier: Apache-2.0
"""How Triton kernels are launched: one program for each block of values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """The shape of a launch."""

    block: int
    """Values per program."""

    num_warps: int

    def num_programs(self, n: int) -> int:
        return triton.cdiv(n, self.block)

    @property
    def options(self) -> dict[str, int | bool]:
        """Keywords of a launch. There is no multiply-add to fuse, but Triton 3.9 warns unless it is
        told so."""
        return {
            "BLOCK": self.block,
            "num_warps": self.num_warps,
            "enable_fp_fusion": False,
        }

    def launch(self, kernel: triton.JITFunction, n: int, *args: Tensor | int) -> None:
        """Run `kernel` on n values, on the device of its first argument; not at all if n is 0."""
        if n:
            with torch.cuda.device_of(args[0]):
                kernel[(self.num_programs(n),)](*args, n, **self.options)


@triton.jit
def positions(BLOCK: tl.constexpr):
    """The positions of this program's block, as 64 bits: the last may be beyond 2^31."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
