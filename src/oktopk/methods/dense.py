# SPDX-License-Identifier: Apache-2.0
"""`dense`: everything, by all-reduce. Every method's warm-up steps are exchanged this way."""

from __future__ import annotations

import math

from torch import Tensor

from oktopk.comm.communicator import Comm
from oktopk.methods.base import Cost, DenseSum, Method, Work


def all_reduce(acc: Tensor, comm: Comm) -> DenseSum:
    """Sum everything, in place. 2n(P-1)/P words."""
    return DenseSum(comm.all_reduce_(acc, stage="dense"))


def cost(work: Work) -> Cost:
    """A ring or halving all-reduce: 2n(P-1)/P values, and no kernels of ours."""
    rounds = 2 * math.ceil(math.log2(work.size)) if work.size > 1 else 0
    numel = work.numel + work.num_dense
    sent = 2 * work.dtype.itemsize * numel * (work.size - 1) / work.size
    return Cost(rounds=rounds, bytes=sent, sent=sent, elements=0, entries=0)


METHOD = Method(name="dense", summary="everything, by allreduce", words="2n(P-1)/P", cost=cost)
