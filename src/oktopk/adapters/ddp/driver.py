# SPDX-License-Identifier: Apache-2.0
"""`StepDriver`: turns the buckets that DDP hands over into steps of the engine.

It runs on the communication thread. While DDP may still rebuild its buckets, and where a gradient
must be clipped before the exchange, a step begins after the last bucket; else each bucket is
exchanged as it arrives, while backward continues.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import Tensor

from oktopk.adapters.clipping import clip_
from oktopk.adapters.ddp.bucket_tracker import BucketTracker
from oktopk.adapters.ddp.communication_thread import ReadyBucket, share
from oktopk.adapters.ddp.parameters import DDPParameterLayout
from oktopk.adapters.driver import Driver, OnStep
from oktopk.comm.communicator import Comm
from oktopk.comm.replica_check import check_replicas
from oktopk.engine.buckets import Layout
from oktopk.engine.step import Step
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.settings import Settings

log = logging.getLogger("oktopk")


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverOptions:
    """Options of `attach` beside `Settings`."""

    clip_before: float | None = None
    """Clip this rank's gradient to this norm before the exchange."""

    check_every: int = 100
    """Steps between comparisons of the weights of all ranks; 0 is never."""

    overlaps: bool = True
    """Whether buckets may be exchanged while backward continues."""


class StepDriver(Driver[DDPParameterLayout]):
    """The steps of a DDP model on this rank."""

    def __init__(
        self,
        settings: Settings,
        comm: Comm,
        parameters: DDPParameterLayout,
        scaling: ResidualScaling,
        options: DriverOptions,
        on_step: OnStep | None,
    ) -> None:
        super().__init__(settings, comm, parameters, on_step)
        self.buckets = BucketTracker()
        self.joined = self.has_joined = False
        """Whether this rank ran out of data in a `join` and shadows the others, now or ever."""

        self.lr_factors: dict[str, float] = {}
        """By parameter: the factor by which the residual was rescaled at the start of the step."""

        self.scaling = scaling
        self._options = options
        self._overlapped: list[tuple[int, ...]] = []
        """Signatures of DDP's buckets, once each is exchanged as it arrives; empty before."""

        self._waiting: list[ReadyBucket] = []
        self._step: Step | None = None
        self._copies: list[Tensor] | None = None
        """The gradients of this step in another layout than DDP's, where that is needed."""

    def set_layout(self, layout: Layout, residuals: dict[str, Tensor]) -> None:
        """Cut the engine's buckets as given, and carry the residuals over."""
        super().set_layout(layout, residuals)
        if self.engine.residual is not None:
            share(self.engine.residual)

    def restart(self, settled: Layout) -> None:
        """Begin again after a state was loaded; DDP's final buckets were `settled`."""
        self.buckets.restart(settled)
        self._overlapped = []
        self.is_checked = False

    def take(self, ready: ReadyBucket) -> None:
        """Take one bucket; with the last one the step ends."""
        if ready.index == 0:
            self._waiting = []
            self.discard_step()  # of a backward that raised before its last bucket
        self._waiting.append(ready)
        overlaps = bool(self._overlapped)
        if overlaps:
            self._take_overlapped(ready)
        if ready.is_last:
            if not overlaps:
                self._take_all()
            self._finish(ready)

    def discard_step(self) -> None:
        """Roll back a step that was begun and cannot be finished."""
        if self._step is not None:
            self._step.discard()
            self._step = None

    def _take_overlapped(self, ready: ReadyBucket) -> None:
        known = self._overlapped[ready.index : ready.index + 1]
        if known != [ready.signature()]:
            raise RuntimeError("DDP changed its buckets in the middle of training")
        if ready.index == 0:
            self._step = self._begin(ready.buffer)
        assert self._step is not None
        self._step.add_bucket(ready.index, ready.buffer)

    def _take_all(self) -> None:
        """Begin the step now, with all buckets at once."""
        ddp_layout = self.parameters.layout_of(self._waiting)
        self.parameters.check_sizes(self._waiting, ddp_layout)
        layout = self.buckets.observe(self.engine.step, self.layout, ddp_layout)
        if layout != self.layout:
            with self.engine.lock:
                self.set_layout(layout, self.residuals)
        if not self.is_checked:
            first = self._waiting[0].buffer
            self.check_consistency(first, check_every=self._options.check_every)
        needs_copies = layout != ddp_layout
        may_overlap = self._options.overlaps and self._options.clip_before is None
        if self.buckets.is_steady and not needs_copies and may_overlap:
            self._overlapped = [ready.signature() for ready in self._waiting]
        copies = self.parameters.copies(self._waiting, layout) if needs_copies else None
        grads = copies or [ready.buffer for ready in self._waiting]
        if self._options.clip_before is not None:
            clip_(grads, self._options.clip_before * self.scaling.loss_scale)
        self._step = self._begin(grads[0])
        for bucket, grad in enumerate(grads):
            self._step.add_bucket(bucket, grad)
        self._copies = copies

    def _begin(self, like: Tensor) -> Step:
        self._rescale_residual()
        step = self.engine.begin(like)  # from here on all traffic counts for this step
        plan, buckets = step.plan, self.engine.buckets
        is_first = plan.step == self.engine.settings.warmup_steps
        if plan.phase == "sparse" and is_first and self.comm.rank == 0:
            log.info(
                "step %d: the sparse phase begins, %s at density %g: %d of %d entries, %d dense",
                plan.step,
                self.engine.settings.method,
                plan.density,
                plan.k,
                buckets.numel,
                buckets.num_dense,
            )
        every = self._options.check_every
        if every and plan.step and plan.step % every == 0:
            try:
                self._check_replicas(plan.step)
            except BaseException:
                step.discard()
                raise
        return step

    def _check_replicas(self, step: int) -> None:
        flags = {"joined": self.joined, "has_joined": self.has_joined}
        check_replicas(self.parameters.parameters, self.comm, step, **flags)

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

    def _finish(self, last: ReadyBucket) -> None:
        assert self._step is not None
        stats = self.engine.finish(self._step, waited_since=last.at)
        self._step = None
        if self._copies is not None:
            self.parameters.copy_back(self._copies, self._waiting, self.layout)
            self._copies = None
        self.report(stats)
