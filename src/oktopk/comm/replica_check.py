"""A cheap check that all ranks hold the same weights.

Buffers are not compared. DDP sends rank 0's to everyone before each forward, so a difference does
not last; and where it does not (`broadcast_buffers=False`, or running statistics between a forward
and the next) they differ by right.
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
BLOCK = 1 << 16  # values weighted at once
ODD = -0x61C8864680B583EB  # 2^64 over the golden ratio, as int64: its multiples look random


@cache
def _weights(device: torch.device) -> Tensor:
    """An odd weight for every place in a block; none is the same, so an exchange is seen."""
    mixed = torch.arange(1, BLOCK + 1, device=device) * ODD
    return (mixed ^ (mixed >> 29)) | 1


def checksum(x: Tensor) -> Tensor:
    """A number for the bits of x in their order, modulo 2^64. One read, 1 MB of scratch."""
    bits = x.detach().reshape(-1).view(INTEGER[x.element_size()])
    total, weights = bits.new_zeros((), dtype=torch.int64), _weights(x.device)
    for block in bits.split(BLOCK):
        total = total * ODD + (block * weights[: len(block)]).sum()
    return total


def check_replicas(
    parameters: dict[str, Tensor],
    comm: Comm,
    step: int,
    *,
    joined: bool = False,
    has_joined: bool = False,
) -> None:
    """Raise ReplicaError on every rank, naming the first tensor that differs and where.

    One read of the weights, and a header of 8 bytes per tensor and 2 more words. A rank that has
    `joined` (`DistributedDataParallel.join`: it ran out of data and only shadows the others) does
    not step its optimizer, so its weights are left out until DDP overwrites them at the end of the
    join; `has_joined` says that it once did.
    """
    if not parameters:
        return
    sums = [checksum(parameter) for parameter in parameters.values()]
    flags = sums[0].new_tensor([joined, has_joined])
    everyone = comm.all_gather(torch.cat([torch.stack(sums), flags]), stage="weights").cpu()
    active = (everyone[:, -2] == 0).nonzero().view(-1)
    differs = everyone[active] != everyone[active[:1]]
    for column, name in enumerate(parameters):
        others = active[differs[:, column]].tolist()
        if others:
            raise ReplicaError(
                f"rank {comm.rank}, step {step}: the weights of {name!r} differ "
                f"between rank {int(active[0])} and {ranks_text(others)}"
                + (AFTER_JOIN if everyone[:, -1].any() else "")
            )
