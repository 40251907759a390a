# SPDX-License-Identifier: Apache-2.0
"""Whether an optimizer has stepped before, by its state."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oktopk.optim.flat_views import local_shard
from oktopk.optim.residual_scaling import local_optimizer


def steps_taken(optimizer: Any) -> int | None:
    """The number of steps that an optimizer has taken: 0 for a new one, None for some number.

    Not every optimizer counts its steps, and SGD without momentum has no state to tell them by: it
    looks new. A state of zeros looks new too: `torch.distributed.checkpoint` makes one to load
    into. Shards of DTensors are read as they are, since the other ranks do not take part.
    """
    states = [
        state
        for state in local_optimizer(optimizer).state.values()
        if any(map(_moved, state.items()))
    ]
    counts = [int(local_shard(state["step"])) for state in states if "step" in state]
    if not states:
        return 0
    return max(counts) if counts else None


def _moved(entry: tuple[Any, Any]) -> bool:
    """Whether an entry of a parameter's state has left zero; the count of steps does not tell."""
    name, value = entry
    return name != "step" and isinstance(value, Tensor) and bool(local_shard(value).any())
