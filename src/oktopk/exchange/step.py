# SPDX-License-Identifier: Apache-2.0
"""One step of an exchange: what it will do, the five moves, what it measured, and how it is
committed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from time import perf_counter
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm, Ledger, Traffic, dense_allreduce
from oktopk.exchange.layout import UNSHARDED, Buckets, Shards, by_bucket
from oktopk.methods import METHODS, dense
from oktopk.methods.base import (
    Average,
    Candidates,
    DenseSum,
    Method,
    MethodState,
    SparseMethod,
    SparseSum,
)
from oktopk.settings import Settings, num_kept
from oktopk.sparse import Sparse, acc_dtype, empty
from oktopk.stats import Phase, StepStats
from oktopk.wire import CodecName

# `StepPlan`: what a step will do, decided once before its first bucket arrives.
#
# A plan follows from the settings, the number of the step and the quotas, which are the same on
# every rank. So every rank has the same plan.


NEVER = 2**62  # steps, or entries

QUOTA_STEPS = frozenset({0, 1, 2, 4, 8, 16})
"""Sparse steps that also set quotas: early in the sparse phase the gradient shifts between layers
quickly, and quotas of `exact_every` steps ago would not fit any more."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Buckets that are selected and exchanged together, and how many entries they keep."""

    buckets: range
    k: int
    """At density 1 the size of the group."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Valid for this step only."""

    step: int
    phase: Phase
    density: float
    k: int
    """Entries to keep; those that travel dense come on top. Of a model that is sharded over ranks
    these are the entries of this rank's shard, as far as they are known before the step."""

    model_k: int
    """Entries of the whole model to keep, all shards together."""

    divides_k: bool
    """Whether the shards of the model divide `model_k` anew in this step (`engine.shards`)."""

    codec: CodecName
    overshoot: float
    """Deliver this much more of every sum than was accumulated (`Settings.overshoot`)."""

    average: Average
    """Which ranks the sparse sums are averaged over. What travels dense is averaged over all."""

    decay: float
    """The residual is multiplied by this first (`Settings.decay`)."""

    groups: tuple[GroupPlan, ...]
    whole_model: bool
    """Whether all buckets are one group, in order to set the quotas of the next steps."""


def make_plan(
    settings: Settings,
    step: int,
    buckets: Buckets,
    quotas: list[int],
    shards: Shards = UNSHARDED,
    shares: Sequence[int] = (),
) -> StepPlan:
    """The plan of step number `step`. `shares` are the entries that each shard keeps, if known."""
    if settings.is_dense(step):
        groups = tuple(
            GroupPlan(range(i, i + 1), bucket.numel) for i, bucket in enumerate(buckets.items)
        )
        return StepPlan(
            step=step,
            phase="dense",
            density=1.0,
            k=buckets.numel,
            model_k=buckets.numel,
            divides_k=False,
            codec="plain",
            overshoot=0.0,
            average="all",
            decay=settings.decay,
            groups=groups,
            whole_model=False,
        )
    density = settings.rank_density(settings.density_at(step))
    model_k = num_kept(shards.num_sparse(buckets), density)
    divides = shards.size > 1 and density < 1 and settings.scope == "model"
    divides_k = divides and (_is_due(settings, step) or sum(shares) != model_k)
    k = num_kept(buckets.numel - buckets.num_dense, density)
    if divides and not divides_k:
        k = shares[shards.rank]
    whole_model = has_quotas(settings, buckets) and (
        divides_k or _is_due(settings, step) or sum(quotas) != k
    )
    if whole_model:
        groups = (GroupPlan(buckets.everything, _all_if_dense(buckets.numel, k, density)),)
    else:
        groups = tuple(
            GroupPlan(group, _group_k(i, group, buckets, quotas, k, density))
            for i, group in enumerate(buckets.groups)
        )
    # at density 1 every entry arrives in every step: then it arrives unrounded
    codec: CodecName = "plain" if density == 1 else settings.wire
    return StepPlan(
        step=step,
        phase="sparse",
        density=density,
        k=k,
        model_k=model_k,
        divides_k=divides_k,
        codec=codec,
        overshoot=settings.overshoot_at(step),
        average=settings.average,
        decay=settings.decay,
        groups=groups,
        whole_model=whole_model,
    )


def has_fixed_groups(settings: Settings) -> bool:
    """Whether groups do not depend on `group_numel`: each bucket is one, or the whole model is.

    A method that proposes no candidates must see the whole model to choose.
    """
    method = METHODS[settings.method]
    proposes = isinstance(method, SparseMethod) and method.propose is not None
    return settings.scope == "bucket" or not proposes


def min_group_numel(settings: Settings, group_numel: int) -> int:
    """Entries that make a group."""
    if not has_fixed_groups(settings):
        return group_numel
    return 1 if settings.scope == "bucket" else NEVER


def has_quotas(settings: Settings, buckets: Buckets) -> bool:
    """Whether groups leave before the whole gradient is known, each with a quota of k."""
    return len(buckets.groups) > 1 and settings.scope == "model"


def _is_due(settings: Settings, step: int) -> bool:
    """Whether k is divided anew in this step, among groups of buckets and among shards."""
    sparse_step = step - settings.warmup_steps
    return sparse_step in QUOTA_STEPS or sparse_step % settings.exact_every == 0


def _group_k(
    number: int, group: range, buckets: Buckets, quotas: list[int], k: int, density: float
) -> int:
    if quotas:
        group_k = quotas[number]
    elif len(buckets.groups) == 1:
        group_k = k
    else:
        group_k = num_kept(buckets.num_sparse(group), density)
    return _all_if_dense(buckets.starts[group.stop] - buckets.starts[group.start], group_k, density)


def _all_if_dense(numel: int, k: int, density: float) -> int:
    """At density 1 a method may keep everything there is, what travels dense included.

    That part is 0 in the vector it selects from. With a k below the size of that vector, a method
    would look for a threshold that about k entries reach, and leave out up to a tenth of them.
    """
    return numel if density == 1 else k


# `StepRecorder`: times and byte counts of one step, and its statistics in the end.


Timed = Literal["select", "exchange", "scatter"]


class StepRecorder:
    """What the buckets exchanged, the seconds, and the ledger since the step began."""

    def __init__(self, ledger: Ledger) -> None:
        self.sums: dict[int, SparseSum | DenseSum] = {}
        """By bucket."""

        self._ledger = ledger
        self._before = ledger.snapshot()
        self._start = perf_counter()
        self._seconds: dict[Timed, float] = {"select": 0.0, "exchange": 0.0, "scatter": 0.0}
        self._thresholds = [0.0, 0.0]

    @contextmanager
    def clock(self, what: Timed) -> Iterator[None]:
        """Add the seconds of a block to one of the times."""
        start = perf_counter()
        yield
        self._seconds[what] += perf_counter() - start

    def all_finite(self, dtypes: dict[int, torch.dtype], divisor: float) -> bool:
        """Whether all sums are finite, and so are their averages in the dtype of their bucket.

        Records the thresholds too, so that the host waits for the device once. To be called before
        the sums are applied: a dense sum shares its memory with the gradient.
        """
        parts = []
        for bucket, sums in self.sums.items():
            for part in _values(sums):
                # an average is finite if its sum is, unless it is delivered in fewer bits
                same = part.dtype == dtypes[bucket]
                parts.append(part if same else (part / divisor).to(dtypes[bucket]))
        sparse = self._sparse_sums
        # the smallest selected magnitude is the threshold in effect
        sent = [sums.sent.values for sums in sparse if sums.sent.num]
        result = [sums.result.values for sums in sparse if sums.result.num]
        finite, self._thresholds = kernels.finite_and_smallest(parts, sent, result)
        return finite

    def stats(
        self,
        plan: StepPlan,
        *,
        numel: int,
        num_dense: int,
        k: int,
        itemsize: int,
        size: int,
        skipped: bool,
        waited_since: float | None,
    ) -> StepStats:
        """The statistics of the finished step; `num_dense` entries traveled dense in it."""
        traffic = self._ledger.since(self._before)
        total = sum(traffic.values(), Traffic())
        sparse = self._sparse_sums
        if plan.phase == "dense":
            num_local = num_result = numel
        else:
            num_local = sum(sums.sent.num for sums in sparse) + num_dense
            num_result = sum(sums.result.num for sums in sparse) + num_dense
        return StepStats(
            step=plan.step,
            phase=plan.phase,
            numel=numel,
            k=k + num_dense,
            skipped=skipped,
            local=num_local,
            result=0 if skipped else num_result,
            local_threshold=self._thresholds[0],
            global_threshold=self._thresholds[1],
            imbalance=max((sums.imbalance for sums in sparse), default=1.0),
            bytes_sent=total.sent,
            bytes_header=total.header_sent,
            bytes_received=total.received,
            bytes_dense=dense_allreduce(numel * itemsize, size).sent,
            entries_sent=sum(sums.num_sent for sums in sparse),
            messages=total.messages_sent,
            stages={stage: part for stage, part in traffic.items() if part != Traffic()},
            **self._seconds,
            exposed=perf_counter() - (self._start if waited_since is None else waited_since),
        )

    @property
    def _sparse_sums(self) -> list[SparseSum]:
        return [sums for sums in self.sums.values() if isinstance(sums, SparseSum)]


def _values(sums: SparseSum | DenseSum) -> tuple[Tensor, ...]:
    if isinstance(sums, DenseSum):
        return (sums.result,)
    return sums.result.values, sums.dense_part


# Error feedback: what was sent and is in the result leaves the residual; the rest stays.


def apply_sparse_(
    grad: Tensor, acc: Tensor, sums: SparseSum, size: int, overshoot: float = 0.0
) -> None:
    """Turn `grad` into the average and `acc` into the next residual, in place.

    What this rank sent leaves `acc` where the result has it, as the receivers decoded it. So the
    sum over ranks of `acc` equals the result plus the sum over ranks of the residuals, element by
    element. With an overshoot the result is that much larger, and each rank's residual is reduced
    by the overshoot on what it sent.
    """
    factor = 1 + overshoot
    kernels.apply_result_(grad, acc, sums.result, sums.sent, size, factor, sums.offset)
    for correction in sums.corrections:  # one by one: indices are unique within each
        kernels.add_at_(acc, correction, factor, sums.offset)


def apply_dense_(grad: Tensor, acc: Tensor | None, sums: DenseSum, size: int) -> None:
    """Turn `grad` into the average. Everything was applied, so the next residual is zero."""
    grad.copy_(sums.result.div_(size))
    if acc is not None:
        acc.zero_()


# `Step`: the five moves of an exchange, over a gradient that arrives in buckets.
#
# A step works on copies: it writes `acc = residual + gradient` to a buffer of its own and updates
# copies of the method states. The engine takes them over, all at once, when every bucket has been
# exchanged and no rank had a NaN. So a step that ends early, for whatever reason, is rolled back
# by dropping it, and a state dict that is taken meanwhile is the one before the step.


Moves = Generator[None, Tensor, None]
"""The exchange of one group: `send` it the gradient of each bucket, then `send` once more."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The flat vectors of a step."""

    residual: Tensor | None
    """Before the step. The step does not change it. None before the first sparse step."""

    acc: Tensor | None
    """Residual plus gradient; after `apply` the residual after the step."""


class Step:
    """What lives for one step. A step whose `apply` was not called has changed nothing."""

    def __init__(
        self,
        plan: StepPlan,
        buckets: Buckets,
        method: Method,
        states: list[MethodState],
        memory: Memory,
        comm: Comm,
        shards: Shards = UNSHARDED,
    ) -> None:
        self.plan = plan
        self.k = plan.k
        """Entries to keep: the plan's, unless this step divides k among the shards."""

        self.shares: list[int] = []
        """Entries that each shard keeps, in a step that divides k."""

        self.states = states
        """One for each group; copies of the engine's."""

        self.memory = memory
        self.grads: dict[int, Tensor] = {}
        """DDP's buckets. `apply` writes the averages into them."""

        self.recorder = StepRecorder(comm.ledger)
        self._buckets, self._method, self._comm = buckets, method, comm
        self._shards = shards
        self._unused: list[tuple[int, int]] = []
        """Ranges of the model without a gradient: their residual is left out of the step."""

        self._moves = [
            self._five_moves(group, state)
            if isinstance(method, SparseMethod) and plan.phase == "sparse"
            else self._dense_moves(group)
            for group, state in zip(plan.groups, states, strict=True)
        ]
        self._group_of = [i for i, group in enumerate(plan.groups) for _ in group.buckets]
        for moves in self._moves:
            next(moves)  # to the first `yield`, where a bucket is awaited

    def add_bucket(self, bucket: int, grad: Tensor) -> None:
        """Take one bucket's gradient. Its group is exchanged now if this is its last bucket."""
        self.grads[bucket] = grad
        self._moves[self._group_of[bucket]].send(grad)

    def agree_on_finite(self) -> bool:
        """Whether no rank had a NaN or Inf, in a gradient or in a sum. The same on every rank, of
        all shards of the model.

        The flag of each rank traveled with the sizes of its messages. Sums may overflow though no
        gradient did; they are the same on all ranks, so all ranks see that too.
        """
        dtypes = {bucket: grad.dtype for bucket, grad in self.grads.items()}
        finite = self.recorder.all_finite(dtypes, self._divisor / (1 + self.plan.overshoot))
        if not finite:
            self._comm.raise_unsound()
        finite = finite and not self._comm.nonfinite
        device = next((grad.device for grad in self.grads.values()), torch.device("cpu"))
        finite = self._shards.agree_on_finite(finite, device)
        self._comm.nonfinite = not finite
        return finite

    def apply(self) -> None:
        """Write the averages into the gradients, and the next residual into `memory.acc`."""
        with self.recorder.clock("scatter"):
            for moves in self._moves:
                next(moves, None)  # from the last `yield` to the end
            for start, end in self._unused:
                assert self.memory.acc is not None and self.memory.residual is not None
                self.memory.acc[start:end] += self.memory.residual[start:end]

    def skip(self, fill: float) -> None:
        """Fill the gradients with a value instead of applying anything."""
        self.discard()
        with self.recorder.clock("scatter"):
            for grad in self.grads.values():
                grad.fill_(fill)

    def discard(self) -> None:
        """Free the memory of a step that is not applied: a suspended generator refers to it."""
        for moves in self._moves:
            moves.close()

    def _five_moves(self, group: GroupPlan, state: MethodState) -> Moves:
        """The exchange of one group of buckets, line by line as in the paper.

        With a decay, `residual` stands for the decayed one.

        A generator, because a group arrives bucket by bucket, and because nothing may be applied
        before all ranks know that none of them had a NaN.
        """
        method, recorder = self._method, self.recorder
        assert isinstance(method, SparseMethod) and self.memory.acc is not None
        acc = self._buckets.part(self.memory.acc, group.buckets)
        candidates = None
        if method.propose is not None and not (self.plan.whole_model or self.plan.divides_k):
            candidates = method.propose(acc, group.k, state)
        dense_parts = []
        for bucket in group.buckets:
            grad = yield  # wait for the next bucket
            with recorder.clock("select"):  # acc = residual + gradient
                dense_parts.append(self._accumulate(bucket, grad, candidates))
        with recorder.clock("select"):  # local = select(acc)
            k = self._divided(acc) if self.plan.divides_k else group.k
            local = method.select(acc, k, state, candidates)
            dense_part = torch.cat(dense_parts)
            local = self._without_nonfinite(local, k, acc, dense_part)
        with recorder.clock("exchange"):  # result = exchange(local)
            how = self.plan.codec, self._comm, self.plan.average
            sums = method.exchange(local, dense_part, k, state, *how)
            recorder.sums |= by_bucket(sums, group.buckets, self._buckets)
        del local, sums, dense_part, dense_parts, candidates  # their memory is not needed any more
        yield  # wait until all groups are exchanged and all ranks agree to apply
        for bucket in group.buckets:  # residual = acc - what was applied; gradient = result / P
            self._apply_bucket(bucket)

    def _dense_moves(self, group: GroupPlan) -> Moves:
        """The same for a bucket that is exchanged densely: everything is selected and applied."""
        grad = yield
        (bucket,) = group.buckets
        with self.recorder.clock("select"):
            acc = grad.to(acc_dtype(grad))
            if self.memory.residual is not None:  # of a sparse phase before this dense one
                residual = self._buckets.part(self.memory.residual, group.buckets)
                acc = acc + (residual if self.plan.decay == 1 else residual * self.plan.decay)
        with self.recorder.clock("exchange"):
            sums = dense.all_reduce(acc, self._comm)
            self.recorder.sums[bucket] = sums
        yield
        residual = self.memory.acc
        part = None if residual is None else self._buckets.part(residual, group.buckets)
        apply_dense_(grad, part, sums, self._comm.size)

    def _accumulate(self, bucket: int, grad: Tensor, candidates: Candidates | None) -> Tensor:
        """Write `acc = residual + gradient` of a bucket; return what of it travels dense."""
        assert self.memory.residual is not None and self.memory.acc is not None
        only = range(bucket, bucket + 1)
        residual = self._buckets.part(self.memory.residual, only)
        acc = self._buckets.part(self.memory.acc, only)
        if self.plan.decay != 1:  # in the memory of `acc`, which is written in place below
            residual = torch.mul(residual, self.plan.decay, out=acc)
        x = grad.to(residual.dtype)
        dense_part = self._take_dense_part(bucket, x, residual)
        self._leave_out_unused(bucket, grad, x, residual)
        if candidates is None:
            torch.add(residual, x, out=acc)
        else:
            candidates.add_bucket(residual, x, acc)
        return dense_part

    def _take_dense_part(self, bucket: int, x: Tensor, residual: Tensor) -> Tensor:
        """What travels dense of a bucket. `x` is changed so that `acc` is 0 there: it is not
        selected, and leaves no residual.

        The residual is added, as of a parameter that traveled sparse when the state was saved.
        """
        ranges = self._buckets.items[bucket].dense
        parts = [x[start:end] + residual[start:end] for start, end in ranges]
        for start, end in ranges:
            x[start:end] = -residual[start:end]
        return torch.cat(parts) if parts else residual[:0]

    def _leave_out_unused(self, bucket: int, grad: Tensor, x: Tensor, residual: Tensor) -> None:
        """Keep the residual of a parameter that no rank used: DDP would drop what is delivered.

        `acc` is made 0 in its range, of which nothing can be selected; `apply` adds the residual
        back.
        """
        offset = self._buckets.starts[bucket]
        for start, end in self._buckets.items[bucket].may_be_unused:
            if not grad[start:end].any():
                x[start:end] = -residual[start:end]
                self._unused.append((offset + start, offset + end))

    def _divided(self, acc: Tensor) -> int:
        """Divide the model's k among its shards; return the entries that this one keeps."""
        self.shares = self._shards.divide(acc, self.plan.model_k, self._comm)
        self.k = self.shares[self._shards.rank]
        return self.k

    def _without_nonfinite(self, local: Sparse, k: int, acc: Tensor, dense_part: Tensor) -> Sparse:
        """Raise this rank's flag at a NaN or Inf, and offer nothing then.

        A NaN or Inf is larger than every number, so a selection of any entries contains it. No pass
        over n is needed, unless k is 0.
        """
        finite, _ = kernels.finite_and_smallest([local.values if k else acc, dense_part])
        self._comm.nonfinite = self._comm.nonfinite or not finite
        return local if finite else empty(local.numel, acc)

    @property
    def _divisor(self) -> int:
        """What turns a sparse sum into an average; one over its senders is an average already."""
        return 1 if self.plan.average == "senders" else self._comm.size

    def _apply_bucket(self, bucket: int) -> None:
        sums, grad = self.recorder.sums[bucket], self.grads[bucket]
        assert isinstance(sums, SparseSum) and self.memory.acc is not None
        acc = self._buckets.part(self.memory.acc, range(bucket, bucket + 1))
        apply_sparse_(grad, acc, sums, self._divisor, self.plan.overshoot)
        ranges = self._buckets.items[bucket].dense
        totals = sums.dense_part.split([end - start for start, end in ranges]) if ranges else ()
        for (start, end), total in zip(ranges, totals, strict=True):
            grad[start:end] = total / self._comm.size


# `StateLock`: a state is read whole, or not at all.


class StateLock:
    """Held while a state changes, and while several parts of it are read together.

    Other threads wait. A thread that changes the state may be interrupted by a signal, whose
    handler runs on that very thread and must not wait: it cannot read the state then.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._num_changes = 0
        self._broken_off = ""

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold it for a change. An error in the block leaves a state that cannot be read again."""
        with self:
            self._num_changes += 1
            try:
                yield
            except BaseException as error:
                self._broken_off = type(error).__name__
                raise
            finally:
                self._num_changes -= 1

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold it to read a state; RuntimeError where a change of it has begun and not ended."""
        with self:
            if self._num_changes:  # of this thread: others would hold the lock
                raise RuntimeError(
                    "the state is being changed by this very thread, as where a signal handler or "
                    "a callback interrupts it: let the handler set a flag, and take the state when "
                    "the step has ended"
                )
            if self._broken_off:
                raise RuntimeError(
                    f"{self._broken_off} came while the state was being changed, so a part of it "
                    "is old and a part new: load the last one that was saved"
                )
            yield
