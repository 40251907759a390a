"""`StepDriver`: turns the buckets that DDP hands over into steps of the engine.

It runs on the communication thread. While DDP may still rebuild its buckets, and where a gradient
must be clipped before the exchange, a step begins after the last bucket; else each bucket is
exchanged as it arrives, while backward continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from oktopk.adapters.clipping import clip_
from oktopk.adapters.ddp.bucket_tracker import BucketTracker
from oktopk.adapters.ddp.communication_thread import ReadyBucket, share
from oktopk.adapters.ddp.parameters import ParameterLayout
from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import check_consistency
from oktopk.comm.replica_check import check_replicas
from oktopk.engine.buckets import Layout
from oktopk.engine.engine import Engine
from oktopk.engine.step import Step
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.settings import Settings
from oktopk.stats import StepStats

log = logging.getLogger("oktopk")

OnStep = Callable[[StepStats], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverOptions:
    """Options of `attach` beside `Settings`."""

    clip_before: float | None = None
    """Clip this rank's gradient to this norm before the exchange."""

    check_every: int = 100
    """Steps between comparisons of the weights of all ranks; 0 is never."""

    overlaps: bool = True
    """Whether buckets may be exchanged while backward continues."""


class StepDriver:
    """One model's steps on this rank."""

    def __init__(
        self,
        settings: Settings,
        comm: Comm,
        parameters: ParameterLayout,
        scaling: ResidualScaling,
        options: DriverOptions,
        on_step: OnStep | None,
    ) -> None:
        self.engine = Engine(settings, comm, [])
        self.on_step = on_step
        self.layout: Layout = []
        """Names of the parameters in the engine's buckets."""

        self.buckets = BucketTracker()
        self.stats: StepStats | None = None
        self.joined = self.has_joined = False
        """Whether this rank ran out of data in a `join` and shadows the others, now or ever."""

        self.lr_factors: dict[str, float] = {}
        """By parameter: the factor by which the residual was rescaled at the start of the step."""

        self.is_checked = False
        """Whether the ranks have compared their state since the start or the last load."""

        self.comm, self.parameters, self.scaling = comm, parameters, scaling
        self._options = options
        self._overlapped: list[tuple[int, ...]] = []
        """Signatures of DDP's buckets, once each is exchanged as it arrives; empty before."""

        self._waiting: list[ReadyBucket] = []
        self._step: Step | None = None
        self._copies: list[Tensor] | None = None
        """The gradients of this step in another layout than DDP's, where that is needed."""

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

    def set_layout(self, layout: Layout, residuals: dict[str, Tensor]) -> None:
        """Cut the engine's buckets as given, and carry the residuals over."""
        self.engine.set_buckets([self.parameters.bucket(names) for names in layout])
        self.layout = layout
        if residuals:
            like = next(iter(residuals.values()))
            numel, device = self.engine.buckets.numel, self.parameters.device
            self.engine.residual = torch.zeros(numel, dtype=like.dtype, device=device)
            share(self.engine.residual)
            for name, view in self.residuals.items():
                if name in residuals:
                    view.copy_(residuals[name])

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
            self._check_consistency()
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
        if stats.skipped:
            log.warning(
                "rank %d, step %d: a gradient had a NaN or Inf on some rank; no rank applied it "
                "(%d steps skipped so far)",
                self.comm.rank,
                stats.step,
                self.engine.skipped,
            )
        self.stats = stats
        if self.on_step is not None:
            self._call_back(self.on_step, stats)
        self.engine.raise_if_asked(stats)

    def _call_back(self, on_step: OnStep, stats: StepStats) -> None:
        """Call the user's callback. The step is finished: its error must not stop other ranks."""
        try:
            on_step(stats)
        except Exception:
            log.exception("rank %d, step %d: on_step failed", self.comm.rank, stats.step)

    def _check_consistency(self) -> None:
        """Compare what only the first step shows; ValueError on all ranks if it differs."""
        names = [name for bucket in self.layout for name in bucket]
        first = self._waiting[0].buffer
        values = asdict(self.engine.settings) | {
            "step": self.engine.step,
            "check_every": self._options.check_every,
            "parameters": len(names),
            "dense parameters": [name for name in names if self.parameters.is_dense(name)],
            "state": self.engine.shared(),
            "numel": self.engine.buckets.numel,
            "numel dense": self.engine.buckets.num_dense,
            "buckets": self.layout,
            "gradient dtype": str(first.dtype),
        }
        check_consistency(self.comm, first.device, values)
        self.is_checked = True
