# SPDX-License-Identifier: Apache-2.0
"""What DDP's communication hook holds: the handle of its model, and what it sees of a join."""

from __future__ import annotations

import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.ddp.handle import Handle


class HookState:
    """DDP keeps one hook for good, so it holds this: a later `attach` may replace the handle."""

    def __init__(self, model: DistributedDataParallel, handle: Handle) -> None:
        self._model = weakref.ref(model)  # DDP's reducer holds this in C++, where no cycle is found
        self.handle = handle

    def __reduce__(self) -> str:
        """Refuse to be saved or copied."""
        return self.handle.__reduce__()

    def note_join(self) -> None:
        """Tell the handle whether this rank has joined. To be called in the hook.

        DDP runs the hook in backward, but for a rank that has joined in `DistributedDataParallel.
        join`: it runs the hook with zeros there, to match what the others do in their backward.
        """
        model = self._model()
        if model is None or not model._join_config.enable:
            self.handle.driver.joined = False
            return
        if not getattr(model, "_divide_by_initial_world_size", True):
            raise ValueError(
                "join(divide_by_initial_world_size=False) does not work with attach: residuals of "
                "the ranks that have joined are still delivered, so averages are over all ranks; "
                "use join(), or give every rank as many batches as the others"
            )
        self.handle.driver.joined = torch._C._current_graph_task_id() < 0  # no backward here
        self.handle.driver.has_joined = self.handle.driver.has_joined or self.handle.driver.joined


def attached_to(model: DistributedDataParallel) -> HookState | None:
    """The state of our hook, if the model has it."""
    states = [state for _, state in model._comm_hooks if isinstance(state, HookState)]
    return states[0] if states else None
