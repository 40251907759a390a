# SPDX-License-Identifier: Apache-2.0
"""`Fragment`: a part of the model that is exchanged by itself; by default there is one, the model.

Each has its own engine, anchor and round. All have one communicator, and one background thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oktopk.adapters.handle import BaseHandle
from oktopk.adapters.local_steps import state as local_state
from oktopk.adapters.local_steps.background import finished
from oktopk.adapters.local_steps.driver import InFlight, RoundDriver
from oktopk.adapters.local_steps.outer_step import SHARED_METHOD
from oktopk.adapters.parameters import ParameterLayout
from oktopk.engine.saved_state import Exchanged, SavedRates
from oktopk.errors import StateError


class Fragment(BaseHandle[RoundDriver]):
    """The state of one fragment. `LocalSteps` says when it is exchanged, and closes what it uses.

    Nothing of it may be in use by the background thread when its state is read or loaded.
    """

    exchanged: Exchanged = "weight changes"
    method_advice = (
        "call local_steps with the method it was saved with; method='auto' stands for "
        f"{SHARED_METHOD!r}"
    )

    def state_dict(self) -> dict[str, Any]:
        """See `LocalSteps.state_dict`."""
        driver = self.driver
        parameters, in_flight = driver.parameters.stored(), driver.in_flight
        momentum = {} if driver.momentum is None else driver.views(driver.momentum)
        stats = None if in_flight is None else in_flight.job.result()
        return {
            "residuals": driver.copied_residuals(),
            "anchor": _copies(driver.views(driver.anchor)),
            "weights": _copies({name: p.detach() for name, p in parameters.items()}),
            "momentum": _copies(momentum),
            "launched": {} if in_flight is None else _copies(in_flight.weights),
            "launched_stats": local_state.write_stats(stats),
            **driver.buffers.state_dict(),
            "written": _copies(driver.watch.written.values),
            "loaded": sorted(driver.watch.written.loaded),
            "local_steps": driver.local_steps,
            "metadata": self._metadata([], SavedRates(rates={}, peaks={}, scale=None)),
        }

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See `LocalSteps.load_state_dict`."""
        self.load_saved(self.parse(state))

    def parse(self, state: Any, *, roll_back: bool = False) -> local_state.SavedLocalSteps:
        """This rank's part of a state; StateError if it does not fit.

        `roll_back`: of another number of ranks, with an exchange in flight that was skipped.
        """
        rank, world_size = self._place
        local_state.check_shards(state, self.driver.engine.shards.size, rank, world_size)
        saved = local_state.load(
            state,
            super()._parse(state),
            rank=rank,
            world_size=world_size,
            parameters=self.driver.parameters.stored(),
            mixing=self.driver.options.mixing,
            roll_back=roll_back,
        )
        try:
            self.driver.buffers.check(saved.round.buffers, saved.round.buffer_anchor)
        except StateError as error:
            raise StateError(f"rank {rank}: {error}") from None
        return saved

    def load_saved(self, saved: local_state.SavedLocalSteps) -> None:
        """Take over a state that was read."""
        driver, each = self.driver, saved.round
        weights = driver.parameters.stored()
        with torch.no_grad(), driver.engine.lock.changing():
            self._load_exchange(saved, driver.layout)
            for name, view in driver.views(driver.anchor).items():
                view.copy_(each.anchor[name])
                weights[name].copy_(each.weights[name])
            if driver.momentum is not None:
                driver.momentum.zero_()
                for name, view in driver.views(driver.momentum).items():
                    if name in each.momentum:
                        view.copy_(each.momentum[name])
            driver.buffers.load(each.buffers, each.buffer_anchor)
            driver.local_steps = driver.loaded_steps = each.local_steps
            driver.in_flight = self._in_flight(each)
            driver.num_steps, driver.notices = 0, []
            driver.is_at_anchor = False
            driver.watch.written = each.written.copy()
            driver.is_checked = False

    def _in_flight(self, each: local_state.Round) -> InFlight | None:
        if each.stats is None:
            return None
        engine, device = self.driver.engine, self.driver.parameters.device
        counts = engine.step - 1, engine.skipped - each.stats.skipped
        launched = {name: x.to(device) for name, x in each.launched.items()}
        return InFlight(launched, counts, finished(each.stats), 0)

    def close(self) -> None:
        """Nothing: connections and threads belong to `LocalSteps`."""


def divide(parameters: ParameterLayout, num: int) -> list[ParameterLayout]:
    """The trained parameters in `num` parts of about equal size, in the order of the model.

    Each part takes parameters while that brings it nearer to its share of those that are left, and
    leaves at least one for every later part.
    """
    names = list(parameters.parameters)
    if num > len(names):
        raise ValueError(
            f"fragments must be at most the number of trained parameters, {len(names)}, got {num}"
        )
    parts = []
    for later in range(num - 1, -1, -1):
        numels = [parameters.numel(name) for name in names]
        share = sum(numels) / (later + 1)
        sizes = range(len(names) - later, 0, -1)  # the longest of equals: shards may be empty
        size = min(sizes, key=lambda size: abs(sum(numels[:size]) - share))
        parts.append(parameters.part(set(names[:size])))
        names = names[size:]
    return parts


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    contiguous = torch.contiguous_format
    return {name: x.clone(memory_format=contiguous) for name, x in tensors.items()}
