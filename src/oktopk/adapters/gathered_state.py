# SPDX-License-Identifier: Apache-2.0
"""The states of all ranks as one, for frameworks that save what one rank has."""

from __future__ import annotations

import io
from typing import Any, Protocol

import torch
from torch import Tensor

from oktopk.comm.communicator import Comm
from oktopk.engine.saved_state import RANKS


class Gathers(Protocol):
    """A handle."""

    def gathered_state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class GatheredState:
    """A handle's states of all ranks, with the two methods that frameworks call."""

    def __init__(self, handle: Gathers) -> None:
        self._handle = handle

    def state_dict(self) -> dict[str, Any]:
        """`Handle.gathered_state_dict`: all ranks must call it."""
        return self._handle.gathered_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`Handle.load_state_dict`."""
        self._handle.load_state_dict(state)


def gather_states(mine: dict[str, Any], comm: Comm, device: torch.device) -> dict[str, Any]:
    """Every rank's state, in rank order, on the CPU. Sends the whole state to every other rank."""
    words = _words(mine).to(device)
    sizes = comm.all_gather_size(words.numel(), device, stage="state")
    heard = comm.exchange(
        dict.fromkeys(comm.peers, words),
        {peer: sizes[peer] for peer in comm.peers},
        device,
        stage="state",
    )
    heard[comm.rank] = words
    return {RANKS: [_state(heard[rank]) for rank in range(comm.size)]}


def _words(state: dict[str, Any]) -> Tensor:
    """A state as int32 words, which is what messages are made of."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    padding = -buffer.tell() % 4
    buffer.write(bytes(padding))  # the zip format of torch.save lets bytes follow
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.int32)


def _state(words: Tensor) -> dict[str, Any]:
    data = io.BytesIO(words.cpu().numpy().tobytes())
    return torch.load(data, weights_only=True, map_location="cpu")
