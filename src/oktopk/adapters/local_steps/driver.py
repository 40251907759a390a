# SPDX-License-Identifier: Apache-2.0
"""`RoundDriver`: counts the optimizer steps of a round and exchanges the weight changes at its end.

A round is the optimizer steps between two exchanges. The anchor holds the weights after the last
exchange, the same bits on every rank; the weights of a rank leave it by as much as its own
optimizer moves them. With 16-bit parameters the anchor is fp32, so outer steps that are smaller
than a 16-bit rounding error add up in it.
"""

from __future__ import annotations

import logging
from functools import reduce
from time import perf_counter

import torch
from torch import Tensor

from oktopk.adapters.budget import Budget
from oktopk.adapters.driver import Driver, OnStep
from oktopk.adapters.local_steps.outer_step import OuterOptions, outer_step_
from oktopk.adapters.parameters import ParameterLayout
from oktopk.comm.communicator import Comm
from oktopk.comm.replica_check import check_replicas
from oktopk.settings import Settings
from oktopk.sparse import acc_dtype
from oktopk.stats import StepStats

log = logging.getLogger("oktopk")


class RoundDriver(Driver[ParameterLayout]):
    """The rounds of one model on this rank."""

    subject = "a weight change"

    def __init__(
        self,
        settings: Settings,
        comm: Comm,
        parameters: ParameterLayout,
        options: OuterOptions,
        on_step: OnStep | None,
        budget: Budget | None = None,
    ) -> None:
        super().__init__(settings, comm, parameters, on_step, budget)
        self.options = options
        self.local_steps = 0
        """Optimizer steps since the last exchange."""

        self.set_layout([list(parameters.parameters)], {})
        dtypes = [acc_dtype(p) for p in parameters.parameters.values()]
        numel, device = self.engine.buckets.numel, parameters.device
        dtype = reduce(torch.promote_types, dtypes)
        self.anchor = torch.empty(numel, dtype=dtype, device=device)
        """The weights after the last exchange, flat."""

        self.momentum = torch.zeros_like(self.anchor) if options.outer_momentum else None
        self.set_anchor()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector by parameter name."""
        return self.parameters.views(flat, self.layout[0])

    def set_anchor(self) -> None:
        """Let the present weights be the anchor. They must be the same on every rank."""
        for name, view in self.views(self.anchor).items():
            view.copy_(self.parameters.parameters[name].detach())

    def count_step(self) -> bool:
        """Count an optimizer step; whether the round is complete."""
        self.local_steps += 1
        return self.local_steps >= self.options.every

    def exchange(self) -> StepStats:
        """End the round: exchange the weight changes; all ranks apply them, or none."""
        self._check_frozen()
        begun = perf_counter()
        change = self._weight_change()
        if not self.is_checked:
            every, check_every = self.options.every, self.options.check_every
            values = {"every": every, "check_every": check_every, "local steps": self.local_steps}
            self.check_consistency(change, **values)
        step = self.engine.begin(change)
        try:
            self._check_replicas(step.plan.step)
            self.revise_budget(step.plan)
            step.add_bucket(0, change)
            stats = self.engine.finish(step)
        except BaseException:
            step.discard()
            raise
        if stats.skipped:
            self._log_nonfinite(stats.step)
        else:
            outer_step_(self.anchor, change, self.momentum, self.options)
        self._set_weights()
        self.local_steps = 0
        self.note_seconds(stats, begun)
        self.report(stats)
        return stats

    def _weight_change(self) -> Tensor:
        """Weights after the last exchange minus weights now, flat: the outer gradient of DiLoCo."""
        change = torch.empty_like(self.anchor)
        anchors = self.views(self.anchor)
        for name, view in self.views(change).items():
            parameter = self.parameters.parameters[name].detach()
            # as this rank had it: rounded, if the parameter has fewer bits than the anchor
            view.copy_(anchors[name].to(parameter.dtype)).sub_(parameter)
        return change

    def _set_weights(self) -> None:
        for name, view in self.views(self.anchor).items():
            self.parameters.parameters[name].detach().copy_(view)

    def _check_replicas(self, step: int) -> None:
        """Compare the anchors: between exchanges the weights themselves differ."""
        every = self.options.check_every
        if every and step and step % every == 0:
            check_replicas(self.views(self.anchor), self.comm, step)

    def _check_frozen(self) -> None:
        thawed = self.parameters.thawed
        if thawed:
            raise ValueError(
                f"rank {self.comm.rank}, step {self.engine.step}: {thawed} did not require "
                "gradients when local_steps was called, so they are not exchanged, and now they "
                "do: close() the handle and call local_steps again after changing requires_grad"
            )

    def _log_nonfinite(self, step: int) -> None:
        """Name the parameters of this rank that are not finite, before they are overwritten."""
        parameters = self.parameters.parameters
        bad = [name for name, p in parameters.items() if not torch.isfinite(p.detach()).all()]
        if bad:
            log.warning(
                "rank %d, step %d: the weights of this rank are not finite in %s; they are set "
                "back to those of the last exchange, and the optimizer's state is not: if it is "
                "not finite either, reset it",
                self.comm.rank,
                step,
                ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else ""),
            )
