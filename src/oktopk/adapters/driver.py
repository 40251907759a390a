# SPDX-License-Identifier: Apache-2.0
"""Drivers: the engine of one model, its parameters by name, and what is done around each step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import reduce
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from oktopk.adapters.budget import Budget
from oktopk.adapters.buffers import StepBuffers
from oktopk.adapters.parameters import ParameterLayout
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import check_consistency, check_replicas
from oktopk.exchange.engine import Engine
from oktopk.exchange.layout import UNSHARDED, Layout, Shards
from oktopk.exchange.saved_state import SavedBudget
from oktopk.exchange.step import Step, StepPlan
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.optim.staleness import steps_taken
from oktopk.settings import Settings
from oktopk.sparse import common_acc_dtype
from oktopk.stats import StepStats
from oktopk.utils.console import announce

# `Driver`: the engine of one model, its parameters by name, and what is done after each step.


log = logging.getLogger("oktopk")

OnStep = Callable[[StepStats], None]
Parameters = TypeVar("Parameters", bound=ParameterLayout)


class Driver(Generic[Parameters]):
    """One model's steps on this rank. Subclasses say when a step begins and what it exchanges."""

    subject = "a gradient"
    """What a step exchanges, for messages."""

    unit = "step"
    """What is counted, for messages."""

    def __init__(
        self,
        settings: Settings,
        comm: Comm,
        parameters: Parameters,
        on_step: OnStep | None,
        budget: Budget | None = None,
        shards: Shards = UNSHARDED,
    ) -> None:
        self.engine = Engine(settings, comm, [], shards)
        self.comm, self.parameters = comm, parameters
        self.on_step = on_step
        self.budget = budget
        """What chooses density and codec with `density="auto"`, else None."""

        self.ended = perf_counter()
        """When the last exchange ended on this rank."""

        self.layout: Layout = []
        """Names of the parameters in the engine's buckets."""

        self.stats: StepStats | None = None
        self.is_checked = False
        """Whether the ranks have compared their state since the start or the last load."""

        self.start_is_known = False
        """Whether a state was loaded, or the user was told that there is none. Until then the
        first exchange warns of an optimizer that has stepped before."""

    @property
    def rank(self) -> int:
        """The number of this rank among all, shard by shard of replica by replica."""
        return self.comm.rank * self.engine.shards.size + self.engine.shards.rank

    @property
    def residuals(self) -> dict[str, Tensor]:
        """Views of the residual by parameter name; empty before the first sparse step."""
        with self.engine.lock:
            views = {}
            for bucket, names in enumerate(self.layout):
                residual = self.engine.residual_of(bucket)
                if residual is None:
                    return {}
                views |= self.parameters.views(residual, names)
            return views

    @property
    def acc_dtype(self) -> torch.dtype:
        """Of a flat vector that holds changes of all parameters, whose dtypes may differ."""
        return common_acc_dtype(self.parameters.parameters.values())

    def copied_residuals(self) -> dict[str, Tensor]:
        """A copy of the residuals of all parameters, zero before the first sparse step."""
        views, dtype = self.residuals, self.acc_dtype
        return {
            name: views[name].clone(memory_format=torch.contiguous_format)
            if name in views
            else torch.zeros(p.shape, dtype=dtype, device=p.device)
            for name, p in self.parameters.stored().items()
        }

    def set_layout(self, layout: Layout, residuals: dict[str, Tensor]) -> None:
        """Cut the engine's buckets as given, and carry the residuals over."""
        self.engine.set_buckets([self.parameters.bucket(names) for names in layout])
        self.layout = layout
        if residuals:
            dtype = reduce(torch.promote_types, (part.dtype for part in residuals.values()))
            numel, device = self.engine.buckets.numel, self.parameters.device
            self.engine.residual = torch.zeros(numel, dtype=dtype, device=device)
            for name, view in self.residuals.items():
                if name in residuals:
                    view.copy_(residuals[name])

    def revise_budget(self, plan: StepPlan) -> None:
        """Choose density and codec anew if it is due; they hold from the next step on.

        Collective, and part of the step: the step has begun, and its plan is made.
        """
        if self.budget is not None and self.budget.is_due(plan.step):
            density, wire = self.budget.revise(plan.step, self.comm, self.parameters.device)
            self.engine.settings = replace(self.engine.settings, density=density, wire=wire)

    def note_seconds(self, stats: StepStats, begun: float) -> None:
        """Note for the budget how long this rank computed, until `begun`, and then exchanged."""
        now = perf_counter()
        if self.budget is not None and not stats.skipped:
            self.budget.note(stats.step, begun - self.ended, now - begun)
        self.ended = now

    def load_budget(self, saved: SavedBudget | None) -> None:
        """Take over the density and the codec that were chosen when a state was saved."""
        self.ended = perf_counter()
        if self.budget is not None and saved is not None:
            self.budget.load(saved)
            settings, now = self.engine.settings, self.budget.now
            self.engine.settings = replace(settings, density=now.density, wire=now.wire)

    def check_consistency(self, like: Tensor, **values: Any) -> None:
        """Compare what only the first step shows; ValueError on all ranks if it differs."""
        names = [name for bucket in self.layout for name in bucket]
        check_consistency(
            self.comm,
            like.device,
            asdict(self.engine.settings)
            | {
                "step": self.engine.step,
                "parameters": len(names),
                "dense parameters": [name for name in names if self.parameters.is_dense(name)],
                "state": self.engine.shared(),
                "numel": self.engine.buckets.numel,
                "numel dense": self.engine.buckets.num_dense,
                "buckets": self.layout,
                "gradient dtype": str(like.dtype),
            }
            | values,
        )
        self.is_checked = True

    def report(self, stats: StepStats) -> None:
        """Tell the user of a finished step: a warning if it was skipped, the callback, an error."""
        self.tell(stats, self.engine.skipped)
        self.raise_if_asked(stats)

    def tell(self, stats: StepStats, skipped: int) -> None:
        """Keep the statistics of a step, warn if it was skipped, one of `skipped`; call back."""
        if stats.skipped:
            log.warning(
                "rank %d, %s %d: %s had a NaN or Inf on some rank; no rank applied it "
                "(%d %s%s skipped so far)",
                self.comm.global_rank,
                self.unit,
                stats.step,
                self.subject,
                skipped,
                self.unit,
                "s" * (skipped != 1),
            )
        self.stats = stats
        if self.on_step is not None:
            self._call_back(self.on_step, stats)

    def raise_if_asked(self, stats: StepStats) -> None:
        """Raise NonfiniteError after a skipped step, if the settings say so."""
        self.engine.raise_if_asked(stats, self.subject, self.unit)

    def _call_back(self, on_step: OnStep, stats: StepStats) -> None:
        """Call the user's callback. The step is finished: its error must not stop other ranks."""
        try:
            on_step(stats)
        except Exception:
            where = self.comm.global_rank, self.unit, stats.step
            log.exception("rank %d, %s %d: on_step failed", *where)


# `GradientDriver`: what every exchange of gradients does when a step begins.


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


# Clipping of one rank's own gradient, before the exchange.


def clip_(grads: list[Tensor], most: float) -> None:
    """Scale this rank's gradient to a norm of at most `most`. A NaN or Inf stays one.

    Two passes. Squares are summed in float64: in fp32 those of finite gradients can overflow, and
    an infinite norm would make every gradient zero.
    """
    norm = math.hypot(
        *(float(torch.linalg.vector_norm(grad, dtype=torch.float64)) for grad in grads)
    )
    scale = min(1.0, most / (norm + 1e-6))
    for grad in grads:
        grad.mul_(scale)
