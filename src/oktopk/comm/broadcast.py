# SPDX-License-Identifier: Apache-2.0
"""Broadcast of whole tensors, bit for bit, for the start of a run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from oktopk.comm.communicator import Comm

WORD_BYTES = 4


def broadcast_(tensors: Iterable[Tensor], comm: Comm, *, stage: str) -> None:
    """Overwrite the tensors of all ranks with those of rank 0, which sends each to every rank.

    Payload: n(P-1) elements sent by rank 0. One tensor at a time, so that no copy of them all is
    needed.
    """
    for x in map(_distinct, tensors):
        if comm.rank == 0:
            words = _words(x)
            comm.exchange(dict.fromkeys(comm.peers, words), {}, x.device, stage=stage)
        else:
            sizes = {0: -(-x.nbytes // WORD_BYTES)}
            words = comm.exchange({}, sizes, x.device, stage=stage)[0]
            flat = words.view(torch.uint8)[: x.nbytes].view(x.dtype)
            x.detach().copy_(flat.view(x.shape))


def _distinct(x: Tensor) -> Tensor:
    """The entries of a tensor that have memory of their own: an expanded one repeats them."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _words(x: Tensor) -> Tensor:
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    return pad(flat, (0, -flat.numel() % WORD_BYTES)).view(torch.int32)
