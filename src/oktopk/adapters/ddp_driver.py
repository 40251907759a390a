# SPDX-License-Identifier: Apache-2.0
"""From the buckets that DDP hands over to steps of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.budget import Budget
from oktopk.adapters.driver import GradientDriver, OnStep, clip_
from oktopk.adapters.parameters import ParameterLayout, Policy
from oktopk.adapters.thread import ReadyBucket, share
from oktopk.comm.communicator import Comm
from oktopk.exchange.engine import FIRST_STEPS, GroupTuning
from oktopk.exchange.layout import UNSHARDED, Layout, Shards
from oktopk.exchange.step import Step, has_fixed_groups
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.settings import Settings
from oktopk.utils.console import announce
from oktopk.utils.device import to_device, to_host

# `BucketTracker`: in which layout a step is exchanged, while DDP rebuilds its buckets.
#
# DDP rebuilds its buckets once, in the order in which gradients arrived: after its first backward
# pass, or after its second with a static graph. Where a gradient lies in a buffer decides in which
# order the ranks' values are added (a ring starts elsewhere), and so the last bits of the sum. A
# run that is resumed has a new DDP, which starts from its first buckets again. It still has to
# exchange every step in the layout that the uninterrupted run had in that step. Hence three rules:
#
# | step of the run | layout | |---|---| | the first of all | the one that DDP has | | the others
# before `SETTLED` | the same as in the first step | | from `SETTLED` on | the one that DDP settled
# on, which a state dict carries |
#
# Where the rules ask for another layout than DDP has at the moment, the gradients are copied. That
# lasts a few steps, in a new run as in a resumed one. No rule can help a run that is resumed twice
# within its first `SETTLED` steps: none of its processes may have seen what DDP settles on.


SETTLED = 4
"""Steps of a run before DDP's final layout is used. DDP has its final buckets in its third backward
pass in every mode; a run that is resumed in an earlier step has had a third pass by then, too."""


class Seen(Enum):
    """What the backward passes so far have shown of DDP's buckets."""

    NOTHING = auto()
    ONCE = auto()
    TWICE = auto()
    """Two passes with the same buckets: with a static graph DDP may still rebuild them."""

    REBUILT = auto()
    """Other buckets than in the pass before. DDP rebuilds once, so these are the final ones."""

    REBUILT_TWICE = auto()
    """The rebuilt buckets in a second pass."""

    STEADY = auto()
    """The same buckets in three passes: DDP keeps them."""


TRANSITIONS: dict[Seen, tuple[Seen, Seen]] = {
    # state: (after a pass with the same buckets, after a pass with other buckets)
    Seen.NOTHING: (Seen.ONCE, Seen.ONCE),
    Seen.ONCE: (Seen.TWICE, Seen.REBUILT),
    Seen.TWICE: (Seen.STEADY, Seen.REBUILT),
    Seen.REBUILT: (Seen.REBUILT_TWICE, Seen.REBUILT),
    Seen.REBUILT_TWICE: (Seen.STEADY, Seen.REBUILT),
    Seen.STEADY: (Seen.STEADY, Seen.REBUILT),
}

FINAL = (Seen.REBUILT, Seen.REBUILT_TWICE, Seen.STEADY)


class BucketTracker:
    """Watches DDP's buckets. Asking DDP whether it has rebuilt would take a lock of backward's."""

    def __init__(self) -> None:
        self.settled: Layout = []
        """What DDP settled on, in this process or in the one that saved; empty when not known."""

        self.seen = Seen.NOTHING
        self._last: Layout = []

    @property
    def is_steady(self) -> bool:
        """Whether DDP keeps its buckets, so that each can be exchanged as it arrives."""
        return self.seen is Seen.STEADY

    def restart(self, settled: Layout) -> None:
        """Begin again, with what a state dict says that DDP will settle on."""
        self.__init__()
        self.settled = settled

    def observe(self, step: int, current: Layout, ddp: Layout) -> Layout:
        """The layout of this step, where the last step had `current` and DDP now has `ddp`."""
        same, other = TRANSITIONS[self.seen]
        self.seen, self._last = same if ddp == self._last else other, ddp
        # DDP may settle on other buckets than those that were saved, as after a change of their
        # size: then a resumed run cannot have the same bits, but it can have the speed
        if self.seen in FINAL and (not self.settled or self.is_steady):
            self.settled = ddp
        if step >= SETTLED and self.settled:
            return self.settled
        return current or ddp


# `DDPParameterLayout`: the parameters DDP exchanges, and where they lie in its buckets.


class DDPParameterLayout(ParameterLayout):
    """Finds the named parameters in the buckets that DDP hands over."""

    def __init__(self, model: DistributedDataParallel, policy: Policy) -> None:
        managed = {id(parameter) for parameter in model._module_parameters}
        named = {n: p for n, p in model.module.named_parameters() if id(p) in managed}
        super().__init__(named, policy, may_be_unused=model.find_unused_parameters)

    def layout_of(self, buckets: list[ReadyBucket]) -> Layout:
        for ready in buckets:
            for parameter in ready.parameters:  # one that was frozen after DDP had taken it on
                self.parameters.setdefault(self._names[parameter], parameter)
        return [[self._names[p] for p in ready.parameters] for ready in buckets]

    def check_sizes(self, buckets: list[ReadyBucket], layout: Layout) -> None:
        """Raise where a bucket of DDP's is not as large as its parameters: all would be misread."""
        for ready, names in zip(buckets, layout, strict=True):
            numel = sum(self.parameters[name].numel() for name in names)
            if ready.buffer.numel() != numel:
                raise ValueError(
                    f"DDP's bucket {ready.index} has {ready.buffer.numel()} elements, and its "
                    f"parameters have {numel}: {names}; is one of them complex?"
                )

    def copies(self, buckets: list[ReadyBucket], layout: Layout) -> list[Tensor]:
        """A copy of DDP's gradients in the order of another layout."""
        parts = self._gradients(buckets)
        return [torch.cat([parts[name] for name in names]) for names in layout]

    def copy_back(self, copies: list[Tensor], buckets: list[ReadyBucket], layout: Layout) -> None:
        """Copy the averages from the copies back into DDP's buckets."""
        parts = self._gradients(buckets)
        for names, grad in zip(layout, copies, strict=True):
            for name, part in self.parts(grad, names).items():
                parts[name].copy_(part)

    def _gradients(self, buckets: list[ReadyBucket]) -> dict[str, Tensor]:
        parts = {}
        for ready, names in zip(buckets, self.layout_of(buckets), strict=True):
            parts |= self.parts(ready.buffer, names)
        return parts


# `StepDriver`: turns the buckets that DDP hands over into steps of the engine.
#
# It runs on the communication thread. While DDP may still rebuild its buckets, and where a
# gradient must be clipped before the exchange, a step begins after the last bucket; else each
# bucket is exchanged as it arrives, while backward continues.


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverOptions:
    """Options of `attach` beside `Settings`."""

    clip_before: float | None = None
    """Clip this rank's gradient to this norm before the exchange."""

    check_every: int = 100
    """Steps between comparisons of the weights of all ranks; 0 is never."""

    overlaps: bool = True
    """Whether buckets may be exchanged while backward continues."""

    verbose: bool = True
    """Whether rank 0 announces the begin of the sparse phase."""


class StepDriver(GradientDriver[DDPParameterLayout]):
    """The steps of a DDP model on this rank."""

    def __init__(
        self,
        settings: Settings,
        comm: Comm,
        parameters: DDPParameterLayout,
        scaling: ResidualScaling,
        options: DriverOptions,
        on_step: OnStep | None,
        budget: Budget | None = None,
        shards: Shards = UNSHARDED,
    ) -> None:
        super().__init__(
            settings,
            comm,
            parameters,
            scaling,
            options.check_every,
            on_step,
            options.verbose,
            budget,
            shards,
        )
        self.buckets = BucketTracker()
        self.joined = self.has_joined = False
        """Whether this rank ran out of data in a `join` and shadows the others, now or ever."""

        self.options = options
        self._overlapped: list[tuple[int, ...]] = []
        """Signatures of DDP's buckets, once each is exchanged as it arrives; empty before."""

        self.clock = perf_counter
        """Times steps, where the size of groups is measured."""

        self._begun_at: float | None = None
        """When the first bucket of this step came; None if the step does not overlap."""

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
            self._begun_at = self.clock() if self._overlapped else None
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
            self._step = self.begin(ready.buffer)
        assert self._step is not None
        self._step.add_bucket(ready.index, ready.buffer)

    def _take_all(self) -> None:
        """Begin the step now, with all buckets at once."""
        ddp_layout = self.parameters.layout_of(self._waiting)
        self.parameters.check_sizes(self._waiting, ddp_layout)
        layout = self.buckets.observe(self.engine.step, self.layout, ddp_layout)
        if layout != self.layout:
            with self.engine.lock.changing():
                self.set_layout(layout, self.residuals)
        if not self.is_checked:
            first = self._waiting[0].buffer
            self.check_consistency(first, check_every=self.check_every)
        needs_copies = layout != ddp_layout
        may_overlap = self.options.overlaps and self.options.clip_before is None
        if self.buckets.is_steady and not needs_copies and may_overlap:
            self._overlapped = [ready.signature() for ready in self._waiting]
        copies = self.parameters.copies(self._waiting, layout) if needs_copies else None
        grads = copies or [ready.buffer for ready in self._waiting]
        if self.options.clip_before is not None:
            clip_(grads, self.options.clip_before * self.scaling.loss_scale)
        self._step = self.begin(grads[0])
        for bucket, grad in enumerate(grads):
            self._step.add_bucket(bucket, grad)
        self._copies = copies

    def begin(self, like: Tensor) -> Step:
        """Begin a step, with the groups of buckets that it is to have."""
        self._tune_groups()
        return super().begin(like)

    def _tune_groups(self) -> None:
        """Group the buckets as this step is to be measured, or as all ranks choose now."""
        tuning, engine = self.engine.tuning, self.engine
        if tuning is None or tuning.chosen is not None:
            return
        if tuning.is_due(engine.step):
            medians = to_device(tuning.medians(), torch.int64, self.parameters.device)
            (totals,) = to_host(self.comm.all_reduce_header(medians, stage="groups"))
            with engine.lock.changing():
                tuning.choose(totals)
            self._log_choice(tuning, totals)
        with engine.lock.changing():
            if not tuning.choices and engine.step >= self._first_settled_step:
                self._plan_trials(tuning)
            engine.regroup(tuning.group_numel_at(engine.step, engine.group_numel))

    @property
    def _first_settled_step(self) -> int:
        """The first sparse step with the buckets that DDP keeps."""
        return max(self.engine.settings.warmup_steps, SETTLED)

    def _plan_trials(self, tuning: GroupTuning) -> None:
        settings, engine = self.engine.settings, self.engine
        falling = max(settings.falling_steps, FIRST_STEPS)
        # a run that is resumed without trials in its state has buckets that are not settled
        start = max(settings.warmup_steps + falling, engine.step + SETTLED)
        may_overlap = self.options.overlaps and self.options.clip_before is None
        if has_fixed_groups(settings) or not may_overlap:
            tuning.chosen = engine.group_numel
        else:
            tuning.plan(start, list(engine.buckets.items))

    def _log_choice(self, tuning: GroupTuning, totals: list[int]) -> None:
        if self.options.verbose and self.comm.rank == 0:
            took = ", ".join(
                f"{num} entries: {total / self.comm.size / 1e3:.1f} ms"
                for num, total in zip(tuning.choices, totals, strict=True)
            )
            announce(
                f"step {self.engine.step}: group_numel is {tuning.chosen} from now on; from the "
                f"first bucket to the end a step took, with groups of at least {took}"
            )

    def _replica_flags(self) -> dict[str, bool]:
        return {"joined": self.joined, "has_joined": self.has_joined}

    def _finish(self, last: ReadyBucket) -> None:
        assert self._step is not None
        plan = self._step.plan
        stats = self.engine.finish(self._step, waited_since=last.at)
        self._step = None
        if self.engine.tuning and self._begun_at is not None and not plan.whole_model:
            with self.engine.lock.changing():
                self.engine.tuning.record(plan.step, self.clock() - self._begun_at)
        if self._copies is not None:
            self.parameters.copy_back(self._copies, self._waiting, self.layout)
            self._copies = None
        self.note_seconds(stats, last.at)
        self.report(stats)
