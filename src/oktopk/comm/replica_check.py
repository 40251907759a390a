# SPDX-License-Identifier: Apache-2.0
"""A cheap check that all ranks hold the same weights.

Buffers are not compared. DDP usually broadcasts those of rank 0 before each forward, so a
difference does not last. With `broadcast_buffers=False`, and for running statistics between two
forward passes or two exchanges of local steps, a difference is correct.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import ranks_text
from oktopk.errors import ReplicaError

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AFTER_JOIN = (
    "; there was a join before, and DDP then copies the weights of the last rank to the others but "
    "not the state of its optimizer (momentum): copy that too, as docs/guides/ddp.md shows"
)
BLOCK = 1 << 16  # values multiplied at once
ODD = -0x61C8864680B583EB  # 2^64 over the golden ratio, as int64: its multiples look random


@cache
def _factors(device: torch.device) -> Tensor:
    """Return a different odd factor for every place in a block, so that swapped values are seen."""
    mixed = torch.arange(1, BLOCK + 1, device=device) * ODD
    return (mixed ^ (mixed >> 29)) | 1


def checksum(x: Tensor) -> Tensor:
    """Return a hash of the bits of x in their order, modulo 2^64. One read, 1 MB of scratch."""
    bits = x.detach().reshape(-1).view(INTEGER[x.element_size()])
    total, factors = bits.new_zeros((), dtype=torch.int64), _factors(x.device)
    for block in bits.split(BLOCK):
        total = total * ODD + (block * factors[: len(block)]).sum()
    return total


def check_replicas(
    parameters: dict[str, Tensor],
    comm: Comm,
    step: int,
    *,
    joined: bool = False,
    has_joined: bool = False,
) -> None:
    """Raise ReplicaError on every rank if weights differ, with the first tensor and the ranks.

    One read of the weights, and a header of 8 bytes per tensor and 2 more words. A rank that has
    `joined` ran out of data inside `DistributedDataParallel.join`. It does not step its optimizer,
    so its weights are not compared until DDP overwrites them at the end of the join. `has_joined`
    tells that this happened before; the error then explains what may be the cause.
    """
    if not parameters:
        return
    sums = [checksum(parameter) for parameter in parameters.values()]
    flags = sums[0].new_tensor([joined, has_joined])
    everyone = comm.all_gather_header(torch.cat([torch.stack(sums), flags]), stage="weights").cpu()
    active = (everyone[:, -2] == 0).nonzero().view(-1)
    differs = everyone[active] != everyone[active[:1]]
    for column, name in enumerate(parameters):
        others = [comm.global_ranks[rank] for rank in active[differs[:, column]].tolist()]
        if others:
            raise ReplicaError(
                f"rank {comm.global_rank}, step {step}: the weights of {name!r} differ "
                f"between rank {comm.global_ranks[int(active[0])]} and {ranks_text(others)}"
                + (AFTER_JOIN if everyone[:, -1].any() else "")
            )
