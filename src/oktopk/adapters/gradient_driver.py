# SPDX-License-Identifier: Apache-2.0
"""`GradientDriver`: what every exchange of gradients does when a step begins."""

from __future__ import annotations

import logging
from typing import TypeVar

from torch import Tensor

from oktopk.adapters.budget import Budget
from oktopk.adapters.buffers import StepBuffers
from oktopk.adapters.driver import Driver, OnStep
from oktopk.adapters.parameters import ParameterLayout
from oktopk.comm.communicator import Comm
from oktopk.comm.replica_check import check_replicas
from oktopk.engine.shards import UNSHARDED, Shards
from oktopk.engine.step import Step
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.optim.steps_taken import steps_taken
from oktopk.settings import Settings
from oktopk.stats import StepStats
from oktopk.utils.announce import announce

log = logging.getLogger("oktopk")

Parameters = TypeVar("Parameters", bound=ParameterLayout)


class GradientDriver(Driver[Parameters]):
    """The steps of a model whose gradients are exchanged, whoever hands them over."""

    line_to_load = "handle.load(folder), or handle.load_state_dict(state)"
    """What to write to continue from a saved state, for messages."""

    def __init__(
        self,
        settings: Settings,
        comm: Comm,
        parameters: Parameters,
        scaling: ResidualScaling,
        check_every: int,
        on_step: OnStep | None,
        verbose: bool = True,
        budget: Budget | None = None,
        shards: Shards = UNSHARDED,
    ) -> None:
        super().__init__(settings, comm, parameters, on_step, budget, shards)
        self.scaling = scaling
        self.check_every = check_every
        """Steps between comparisons of the weights of all ranks; 0 is never."""

        self.verbose = verbose
        """Whether rank 0 announces the begin of the sparse phase."""

        self.buffers = StepBuffers()
        """What puts the float buffers of the model back after a skipped step."""

        self.lr_factors: dict[str, float] = {}
        """By parameter: the factor by which the residual was rescaled at the start of the step."""

    def begin(self, like: Tensor) -> Step:
        """Rescale the residual, begin a step, and compare the weights of all ranks if it is due."""
        self._rescale_residual()
        step = self.engine.begin(like)  # from here on all traffic counts for this step
        self._warn_of_new_start()
        self._announce_phase(step)
        number = step.plan.step
        try:
            if self.check_every and number and number % self.check_every == 0:
                self._check_replicas(number)
            self.revise_budget(step.plan)
        except BaseException:
            step.discard()
            raise
        return step

    def report(self, stats: StepStats) -> None:
        """Tell the user of a finished step, when what its forward has changed is settled too."""
        self.buffers.end_step(undo=stats.skipped)
        super().report(stats)

    def _warn_of_new_start(self) -> None:
        """Say so once if the optimizer continues and the residuals do not. Not in `attach`: a state
        may be loaded after it."""
        is_known, self.start_is_known = self.start_is_known, True
        optimizer, is_dense = self.scaling.optimizer, self.engine.settings.method == "dense"
        if is_known or optimizer is None or is_dense or self.rank != 0:
            return
        taken = steps_taken(optimizer)
        if taken != 0:
            log.warning(
                "the optimizer has already taken %s, and no state of oktopk was loaded: residuals "
                "start at zero, and the warm-up begins again. If this resumes a run, load its "
                "state after attach, on every rank: %s",
                "steps" if taken is None else f"{taken:,} step{'s' * (taken != 1)}",
                self.line_to_load,
            )

    def _announce_phase(self, step: Step) -> None:
        plan, buckets = step.plan, self.engine.buckets
        is_begin = plan.phase == "sparse" and plan.step == self.engine.settings.warmup_steps
        if is_begin and self.rank == 0 and self.verbose:
            method = self.engine.settings.method
            announce(
                f"step {plan.step}: the sparse phase begins, {method} at density {plan.density:g}: "
                f"{plan.k:,} of {buckets.numel:,} entries, and {buckets.num_dense:,} dense ones"
            )

    def _check_replicas(self, step: int) -> None:
        check_replicas(self.parameters.stored(), self.comm, step, **self._replica_flags())

    def _replica_flags(self) -> dict[str, bool]:
        return {}

    def _rescale_residual(self) -> None:
        """Bring the residual to the present loss scale and learning rates."""
        with self.engine.lock.changing():  # a state must not have new rates beside an old residual
            scale = self.scaling.loss_scale_factor()
            if scale != 1.0:
                self.engine.rescale(scale)
            # called in every step, whatever the settings: it must see every learning rate
            factors = self.scaling.lr_factors(self.parameters.parameters)
            self.lr_factors = factors if self.engine.settings.rescale_with_lr else {}
            for name, residual in self.residuals.items() if self.lr_factors else ():
                residual.mul_(self.lr_factors.get(name, 1.0))
