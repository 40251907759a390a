# SPDX-License-Identifier: Apache-2.0
"""`Engine`: what one model's exchange keeps from step to step.

`begin` starts a step, `Step.add_bucket` takes a bucket the moment it is ready, `finish` ends the
step. In the sparse phase a bucket is added to its residual, and candidates are found, at once; a
group of buckets is exchanged when its last one has arrived (`Settings.group_numel`). Several groups
have quotas of the model's k entries. Quotas are set by steps in which the whole model is selected
and exchanged together: the exact-threshold steps of `oktopk`, and some more at the beginning of the
sparse phase. Methods that cannot propose candidates must see everything to choose, so in scope
"model" the whole model is their only group.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import sha256

import msgspec
import torch
from torch import Tensor

from oktopk.comm.communicator import Comm
from oktopk.errors import NonfiniteError
from oktopk.exchange.layout import (
    UNSHARDED,
    Bucket,
    Buckets,
    Shards,
    check_indexable,
    grouped,
    share_out,
)
from oktopk.exchange.step import (
    NEVER,
    Memory,
    StateLock,
    Step,
    StepPlan,
    has_quotas,
    make_plan,
    min_group_numel,
)
from oktopk.methods import METHODS
from oktopk.methods.base import Count, MethodState, SavedThresholds, SparseSum
from oktopk.settings import DEFAULT_GROUP_NUMEL, Settings
from oktopk.sparse import acc_dtype
from oktopk.stats import StepStats

# `GroupTuning`: chooses the size of groups of buckets by measuring (`group_numel="auto"`).
#
# Small groups leave while backward continues, so their exchange is hidden; large ones need fewer
# messages. Which is faster depends on network, model and machine. So early in the sparse phase the
# model is exchanged in one, two and four groups for a few steps each. Which groups a step has
# follows from its number alone, so all ranks have the same. After the last trial the ranks add up
# their times, and all of them keep the grouping that was fastest.


NUM_GROUPS = (1, 2, 4)
"""Numbers of groups that are tried, as far as the buckets allow."""

FIRST_STEPS = 17
"""Sparse steps before the first trial: earlier ones set quotas often, and thresholds settle."""

TRIAL_STEPS = 8
"""Steps of a trial."""

SETTLING_STEPS = 3
"""First steps of a trial, which are not measured: one sets quotas, others find thresholds."""


class SavedTuning(msgspec.Struct, frozen=True, kw_only=True):
    """A `GroupTuning` as it is saved."""

    start: Count
    choices: list[Count]
    times: list[list[Count]]
    chosen: Count | None


@dataclass(slots=True)
class GroupTuning:
    """The trials of one model: what is tried, what it took, and what was chosen."""

    start: int = 0
    """The step in which the first trial begins."""

    choices: list[int] = field(default_factory=list)
    """Sizes of groups that are tried, one after the other; empty until the trials are planned."""

    times: list[list[int]] = field(default_factory=list)
    """Microseconds of the measured steps of each trial on this rank."""

    chosen: int | None = None
    """The size of groups that was kept; None before that is decided."""

    def plan(self, start: int, buckets: list[Bucket]) -> None:
        """Begin the trials at step `start`; if there is only one choice, it is made."""
        self.start, self.choices = start, distinct_choices(buckets)
        self.times = [[] for _ in self.choices]
        if len(self.choices) == 1:
            self.chosen = self.choices[0]

    def group_numel_at(self, step: int, before: int) -> int:
        """The size of groups in a step; `before` the trials it is the given one."""
        if self.chosen is not None:
            return self.chosen
        if not self.choices or step < self.start:
            return before
        return self.choices[min((step - self.start) // TRIAL_STEPS, len(self.choices) - 1)]

    def trial(self, step: int) -> int | None:
        """The number of the trial that a step belongs to; None if it belongs to none."""
        if self.chosen is not None or not self.choices or step < self.start:
            return None
        number = (step - self.start) // TRIAL_STEPS
        return number if number < len(self.choices) else None

    def is_due(self, step: int) -> bool:
        """Whether all ranks choose before this step."""
        end = self.start + TRIAL_STEPS * len(self.choices)
        return self.chosen is None and bool(self.choices) and step >= end

    def record(self, step: int, seconds: float) -> None:
        """Take note of what a step took, from its first bucket to its end, if it is measured."""
        number = self.trial(step)
        if number is not None and (step - self.start) % TRIAL_STEPS >= SETTLING_STEPS:
            self.times[number].append(round(1e6 * seconds))

    def medians(self) -> list[int]:
        """Microseconds of a usual step of each trial on this rank; -1 where none was measured."""
        return [round(statistics.median(times)) if times else -1 for times in self.times]

    def choose(self, totals: list[int]) -> None:
        """Keep the fastest, by the medians added up over ranks; of equal ones the largest groups.

        A trial that was not measured, as in a run that was resumed in the middle of it, cannot be
        chosen. If none was measured, the first is.
        """
        measured = [i for i, total in enumerate(totals) if total >= 0]
        fastest = min(measured, key=lambda i: totals[i], default=0)
        self.chosen = self.choices[fastest]

    def save(self) -> SavedTuning:
        """What a resumed run needs."""
        return SavedTuning(
            start=self.start,
            choices=list(self.choices),
            times=[list(times) for times in self.times],
            chosen=self.chosen,
        )

    def load(self, saved: SavedTuning) -> None:
        """Continue from what `save` returned."""
        self.start, self.choices, self.chosen = saved.start, list(saved.choices), saved.chosen
        self.times = [list(times) for times in saved.times]


def distinct_choices(buckets: list[Bucket]) -> list[int]:
    """Sizes of groups that cut the buckets into different groups, the largest first."""
    numel = sum(bucket.numel for bucket in buckets)
    by_groups: dict[tuple[range, ...], int] = {}
    for num in NUM_GROUPS:
        size = max(-(-numel // num), 1)
        by_groups.setdefault(grouped(buckets, size).groups, size)
    return list(by_groups.values())


class SavedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """What a resumed run needs of an `Engine`, apart from the residual."""

    step: Count
    skipped: Count
    numels: list[Count]
    """Sizes of the buckets that thresholds and quotas are for."""

    quotas: list[Count]
    group_states: list[SavedThresholds]
    model_state: SavedThresholds
    tuning: SavedTuning | None = None
    """Of the size of groups, where it is measured."""
    shares: list[Count] = []
    """Entries that each shard of the model keeps, of a model that is sharded over ranks."""


class Engine:
    """One model's exchange on one rank: residual, method states, quotas, and the step count."""

    def __init__(
        self,
        settings: Settings,
        comm: Comm,
        buckets: list[Bucket],
        shards: Shards = UNSHARDED,
    ) -> None:
        self.settings = settings
        self.comm = comm
        self.shards = shards
        self.step = 0
        """Finished steps."""

        self.skipped = 0
        self.lock = StateLock()
        """Held while the state changes. Hold it to read several parts of the state together."""

        asked = settings.group_numel
        self.group_numel = DEFAULT_GROUP_NUMEL if asked == "auto" else asked
        """Entries that make a group."""

        self.tuning = GroupTuning() if asked == "auto" else None
        self.set_buckets(buckets)

    def regroup(self, group_numel: int) -> None:
        """Exchange the same buckets in groups of another size. The residual stays as it is."""
        with self.lock.changing():
            self.group_numel = group_numel
            buckets = list(self.buckets.items)
            if self._grouped(buckets) == self.buckets:
                return
            residual, spare = self.residual, self._spare
            self.set_buckets(buckets)
            self.residual, self._spare = residual, spare

    def set_buckets(self, buckets: list[Bucket]) -> None:
        """Use other buckets from now on. The caller carries the residual over."""
        self.buckets = self._grouped(buckets)
        quotas_are_set = has_quotas(self.settings, self.buckets)
        exact_every = NEVER if quotas_are_set else self.settings.exact_every
        state = MethodState(
            exact_every=exact_every,
            bounds_every=self.settings.bounds_every,
            short_bytes=self.settings.short_bytes,
            rank=self.comm.rank,
            size=self.comm.size,
        )
        self.group_states = [copy(state) for _ in self.buckets.groups]
        self.model_state = replace(state, exact_every=1)
        """For steps in which the whole model is one group."""

        self.quotas: list[int] = []
        """Entries that each group keeps; empty when the whole model is one group, or before the
        first step that sets them."""

        self.shares: list[int] = []
        """Entries that each shard of the model keeps; empty before the first step that sets them,
        and where the model is not sharded."""

        self.residual: Tensor | None = None
        self._spare: Tensor | None = None
        """Memory for the next `acc`: fresh memory costs a CPU one fault per page."""

    def _grouped(self, buckets: list[Bucket]) -> Buckets:
        return grouped(buckets, min_group_numel(self.settings, self.group_numel))

    def plan(self) -> StepPlan:
        """The plan of the next step."""
        return make_plan(
            self.settings, self.step, self.buckets, self.quotas, self.shards, self.shares
        )

    def begin(self, like: Tensor) -> Step:
        """Start a step, for gradients of the dtype and on the device of `like`."""
        plan = self.plan()
        if plan.phase == "sparse":
            check_indexable(self.buckets.numels, self.settings.scope)
        self.comm.begin_step()
        if plan.whole_model:
            states = [copy(self.model_state)]
        elif plan.phase == "sparse":
            states = [copy(state) for state in self.group_states]
        else:
            states = [MethodState() for _ in plan.groups]
        method = METHODS[self.settings.method]
        memory = self._memory(plan, like)
        return Step(plan, self.buckets, method, states, memory, self.comm, self.shards)

    def finish(
        self,
        step: Step,
        waited_since: float | None = None,
        also: Callable[[bool], None] | None = None,
    ) -> StepStats:
        """End the step: all ranks apply it, or none. Every bucket must have been added.

        `also` changes what belongs to the same state, and is told whether the step was skipped.
        """
        skipped = not step.agree_on_finite()
        if skipped:
            step.skip(float("nan") if self.settings.on_nonfinite == "deliver" else 0.0)
        else:
            step.apply()
        stats = step.recorder.stats(
            step.plan,
            numel=self.buckets.numel,
            num_dense=0 if step.plan.phase == "dense" else self.buckets.num_dense,
            k=step.k,
            itemsize=max((grad.dtype.itemsize for grad in step.grads.values()), default=4),
            size=self.comm.size,
            skipped=skipped,
            waited_since=waited_since,
        )
        self._commit(step, skipped, also)
        return stats

    def _commit(self, step: Step, skipped: bool, also: Callable[[bool], None] | None) -> None:
        """Count the step and, unless it was skipped, take over what it computed."""
        with self.lock.changing():
            if also is not None:
                also(skipped)
            self.step += 1
            self.skipped += skipped
            if skipped:
                return
            if step.plan.whole_model:
                (self.model_state,) = step.states
                self._set_quotas(step)
            elif step.plan.phase == "sparse":
                self.group_states = step.states
            if step.plan.divides_k:
                self.shares = step.shares
            if step.memory.acc is not None:
                before, self.residual = self.residual, step.memory.acc
                self._spare = before if step.memory.acc.device.type == "cpu" else None

    def _set_quotas(self, step: Step) -> None:
        """Divide k among the groups as the result was; they take over the model's thresholds."""
        counts = [
            sum(
                sums.result.num
                for b in group
                if isinstance(sums := step.recorder.sums[b], SparseSum)
            )
            for group in self.buckets.groups
        ]
        limits = [self.buckets.num_sparse(group) for group in self.buckets.groups]
        self.quotas = share_out(step.k, counts, limits)
        self.group_states = [copy(state) for state in self.group_states]
        for state in self.group_states:
            state.local, state.result = self.model_state.local, self.model_state.result

    def raise_if_asked(
        self, stats: StepStats, what: str = "a gradient", unit: str = "step"
    ) -> None:
        """Raise NonfiniteError after a skipped step, if the settings say so."""
        if stats.skipped and self.settings.on_nonfinite == "raise":
            where = f"rank {self.comm.global_rank}, {unit} {stats.step}"
            raise NonfiniteError(f"{where}: {what} had a NaN or Inf on some rank")

    def residual_of(self, bucket: int) -> Tensor | None:
        """A bucket's part of the residual; None before the first sparse step."""
        if self.residual is None:
            return None
        return self.buckets.part(self.residual, range(bucket, bucket + 1))

    def rescale(self, factor: float) -> None:
        """Multiply the residual and the thresholds: all gradients will be that much larger."""
        with self.lock.changing():
            if self.residual is not None:
                self.residual.mul_(factor)
            for state in (*self.group_states, self.model_state):
                state.local = state.local and state.local.scaled(factor)
                state.result = state.result and state.result.scaled(factor)

    def save(self) -> SavedEngine:
        """Counters, thresholds, bounds and quotas. The caller saves the residual, by name."""
        return SavedEngine(
            step=self.step,
            skipped=self.skipped,
            numels=self.buckets.numels,
            quotas=list(self.quotas),
            group_states=[state.save() for state in self.group_states],
            model_state=self.model_state.save(),
            tuning=self.tuning and self.tuning.save(),
            shares=list(self.shares),
        )

    def load(self, saved: SavedEngine) -> None:
        """Bit-exact for the same groups of buckets; else only the counters are taken over."""
        self.step, self.skipped = saved.step, saved.skipped
        if self.tuning is not None and saved.tuning is not None:
            self.tuning.load(saved.tuning)
            self.regroup(self.tuning.group_numel_at(saved.step, self.group_numel))
        if not self._has_same_groups(saved):
            return
        self.quotas, self.shares = list(saved.quotas), list(saved.shares)
        self.model_state.load(saved.model_state)
        for state, thresholds in zip(self.group_states, saved.group_states, strict=True):
            state.load(thresholds)

    def _has_same_groups(self, saved: SavedEngine) -> bool:
        """Whether thresholds, bounds and quotas were saved for these groups of buckets."""
        groups, starts = self.buckets.groups, self.buckets.starts
        if saved.numels != self.buckets.numels or len(saved.group_states) != len(groups):
            return False
        if len(saved.quotas) not in (0, len(groups)):
            return False
        if len(saved.shares) not in (0, self.shards.size):
            return False
        numels = [starts[group.stop] - starts[group.start] for group in groups]
        states = (*saved.group_states, saved.model_state)
        pairs = zip(states, (*numels, self.buckets.numel), strict=True)
        return all(state.bounds is None or state.bounds[-1] == n for state, n in pairs)

    def shared(self) -> str:
        """A digest of what must be the same on every rank before a step."""
        states = [state.shared() for state in (*self.group_states, self.model_state)]
        tuned = self.tuning and (self.tuning.start, self.tuning.choices, self.tuning.chosen)
        digest = sha256(repr((self.step, self.quotas, self.shares, states, tuned)).encode())
        return digest.hexdigest()[:12]

    def _memory(self, plan: StepPlan, like: Tensor) -> Memory:
        """The residual before the step, zero before the first sparse step, and memory for `acc`."""
        if self.residual is None:
            if plan.phase == "dense":
                return Memory(None, None)
            numel, dtype = self.buckets.numel, acc_dtype(like)
            self.residual = torch.zeros(numel, dtype=dtype, device=like.device)
        spare = self._spare
        if (
            spare is not None
            and spare.shape == self.residual.shape
            and spare.dtype == self.residual.dtype
            and spare.device == self.residual.device
        ):
            return Memory(self.residual, spare)
        return Memory(self.residual, torch.empty_like(self.residual))
