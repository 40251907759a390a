# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels before a model is attached, while no rank waits inside a collective."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from oktopk.kernels.ready import make_ready
from oktopk.sparse import acc_dtype
from oktopk.utils.announce import announce


def compile_kernels(parameters: Iterable[Tensor], *, tell: bool) -> None:
    """Have the kernels ready that the sums for these parameters need; say how long it took.

    Only for CPUs: Triton's kernels are compiled for the sizes that they are launched with.
    """
    compiled = make_ready(acc_dtype(p) for p in parameters if p.device.type == "cpu")
    if compiled is not None and tell:
        announce(str(compiled))
