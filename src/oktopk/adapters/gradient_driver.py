# SPDX-License-Identifier: Apache-2.0
"""`GradientDriver`: what every exchange of gradients does when a step begins."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from oktopk.adapters.budget import Budget
from oktopk.adapters.driver import Driver, OnStep
from oktopk.adapters.parameters import ParameterLayout
from oktopk.comm.communicator import Comm
from oktopk.comm.replica_check import check_replicas
from oktopk.engine.shards import UNSHARDED, Shards
from oktopk.engine.step import Step
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.settings import Settings
from oktopk.utils.announce import announce

Parameters = TypeVar("Parameters", bound=ParameterLayout)


class GradientDriver(Driver[Parameters]):
    """The steps of a model whose gradients are exchanged, whoever hands them over."""

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

        self.lr_factors: dict[str, float] = {}
        """By parameter: the factor by which the residual was rescaled at the start of the step."""

    def begin(self, like: Tensor) -> Step:
        """Rescale the residual, begin a step, and compare the weights of all ranks if it is due."""
        self._rescale_residual()
        step = self.engine.begin(like)  # from here on all traffic counts for this step
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

    def _announce_phase(self, step: Step) -> None:
        plan, buckets = step.plan, self.engine.buckets
        is_begin = plan.phase == "sparse" and plan.step == self.engine.settings.warmup_steps
        is_first = self.comm.rank == 0 and self.engine.shards.rank == 0
        if is_begin and is_first and self.verbose:
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
        with self.engine.lock:  # a state must not have new rates beside an old residual
            scale = self.scaling.loss_scale_factor()
            if scale != 1.0:
                self.engine.rescale(scale)
            # called in every step, whatever the settings: it must see every learning rate
            factors = self.scaling.lr_factors(self.parameters.parameters)
            self.lr_factors = factors if self.engine.settings.rescale_with_lr else {}
            for name, residual in self.residuals.items() if self.lr_factors else ():
                residual.mul_(self.lr_factors.get(name, 1.0))
