# SPDX-License-Identifier: Apache-2.0
"""`LocalSteps`: what `local_steps` returns."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oktopk.adapters.handle import BaseHandle, Connection
from oktopk.adapters.local_steps import state as local_state
from oktopk.adapters.local_steps.driver import RoundDriver
from oktopk.engine.saved_state import Exchanged, SavedRates
from oktopk.errors import ExchangeError, NonfiniteError
from oktopk.stats import StepStats

CLOSED = "the handle of local_steps was closed: call local_steps again"


class LocalSteps(BaseHandle[RoundDriver]):
    """The statistics and the state of a model that is trained by local steps.

    A step of this handle is an exchange: `step`, `stats` and `on_step` count exchanges, not steps
    of the optimizer.
    """

    exchanged: Exchanged = "weight changes"

    def __init__(self, driver: RoundDriver, connection: Connection, optimizer: Optimizer) -> None:
        super().__init__(driver, connection)
        self.failure: BaseException | None = None
        """The error that ended the exchange for good; None while it is well."""

        self._depth = 0
        # the optimizer keeps this handle alive: the user may drop what local_steps returned
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )
        self._finalizer = weakref.finalize(self, connection.failure_detector.close)

    @property
    def local_steps(self) -> int:
        """Optimizer steps since the last exchange."""
        return self.driver.local_steps

    def exchange(self) -> StepStats:
        """Exchange now, in the middle of a round. A collective: all ranks must call it.

        For the end of training, where the number of steps is no multiple of `every`: until the next
        exchange every rank has weights of its own.
        """
        if self.closed:
            raise RuntimeError(CLOSED)
        detector = self._connection.failure_detector
        detector.step = self.step
        try:
            if self.failure is not None:
                raise RuntimeError(f"an exchange failed before: {self.failure}") from self.failure
            if detector.diagnosis is not None:
                raise ExchangeError("another rank reported a failure")
            return self.driver.exchange()
        except NonfiniteError:  # the round was rolled back on all ranks: the next may succeed
            raise
        except BaseException as error:  # Ctrl-C too: the other ranks must learn of it
            if self.failure is None:
                self.failure = error
                detector.abort(error, self.comm)
            raise

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, between exchanges as well as right after one.

        It has this rank's weights, the weights after the last exchange (`anchor`), the residual,
        the outer momentum, thresholds, bounds and counters. The keys are the same on every rank and
        at any time. Inside a round the weights and the residual are this rank's own: save one file
        per rank, or use `gathered_state_dict`. The optimizer's state is each rank's own too, and is
        not part of it.
        """
        driver = self.driver
        parameters = driver.parameters.parameters
        momentum = {} if driver.momentum is None else driver.views(driver.momentum)
        return {
            "residuals": self.driver.copied_residuals(),
            "anchor": _copies(driver.views(driver.anchor)),
            "weights": _copies({name: p.detach() for name, p in parameters.items()}),
            "momentum": _copies(momentum),
            "local_steps": driver.local_steps,
            "metadata": self._metadata([], SavedRates(rates={}, peaks={}, scale=None)),
        }

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue where `state_dict` was taken: the same bits as a run that never stopped.

        Sets the weights of the model too. Takes this rank's own state, what `gathered_state_dict`
        returned, or a list of all ranks' states. The last two may be of another world size: rank r
        then takes over the residuals of ranks r, r+P, ... Every rank must call it; in the middle of
        training the ranks wait for each other.
        """
        saved = self._read(state)
        assert isinstance(saved, local_state.SavedLocalSteps)
        driver = self.driver
        with torch.no_grad(), driver.engine.lock:
            self._load_exchange(saved, driver.layout)
            each = saved.round
            for name, view in driver.views(driver.anchor).items():
                view.copy_(each.anchor[name])
                driver.parameters.parameters[name].copy_(each.weights[name])
            if driver.momentum is not None:
                driver.momentum.zero_()
                for name, view in driver.views(driver.momentum).items():
                    if name in each.momentum:
                        view.copy_(each.momentum[name])
            driver.local_steps = each.local_steps
            driver.is_checked = False

    def _parse(self, state: dict[str, Any] | list[dict[str, Any]]) -> local_state.SavedLocalSteps:
        return local_state.load(
            state,
            super()._parse(state),
            rank=self.comm.rank,
            world_size=self.comm.size,
            parameters=self.driver.parameters.parameters,
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Stop exchanging: remove the hooks of the optimizer and close the process group.

        A communicator that was passed to `local_steps` stays open.
        """
        for hook in self._hooks:
            hook.remove()
        self._finalizer()
        self._close_comm()

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        # After a step that raised, no post-hook has run.
        if self._depth >= _num_hooked(optimizer):
            self._depth = 0
        self._depth += 1

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Count the step once, though the `step` of a subclass may call that of its parent."""
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self.driver.count_step():
            self.exchange()


def _num_hooked(optimizer: Optimizer) -> int:
    """Classes of the optimizer whose `step` runs hooks: torch patches that of every class which has
    had an instance."""
    steps = [vars(kind).get("step") for kind in type(optimizer).__mro__]
    return max(1, sum(getattr(step, "hooked", False) for step in steps))


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    contiguous = torch.contiguous_format
    return {name: x.clone(memory_format=contiguous) for name, x in tensors.items()}
