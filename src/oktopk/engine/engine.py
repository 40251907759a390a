"""The five moves over a gradient that arrives in buckets.

`feed` takes a bucket the moment it is ready; `finish` ends the step. In the sparse phase a bucket
is added to what is owed, and candidates are found, at once; a group of buckets is exchanged when
its last one has come (`Settings.group_numel`). Several groups have quotas of the model's k entries,
which come from steps in which the whole model is selected and exchanged together: the
exact-threshold steps of `oktopk`, more often right after the sparse phase began. The other sparse
methods must see everything to choose, so in scope "model" the whole model is their group.

A step works on copies: it writes `acc = residual + gradient` to a second buffer and advances copies
of the thresholds. The copies replace the engine's own, in one move, once every bucket has been
exchanged and no rank has raised the alarm. So a step that ends early, for whatever reason, is
rolled back by forgetting it, and a state dict that is taken meanwhile is the one before the step.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.engine.buckets import (
    Bucket,
    by_bucket,
    check_indexable,
    grouped,
    share_out,
)
from oktopk.engine.recorder import Tally
from oktopk.engine.residual import settle_
from oktopk.errors import NonfiniteError
from oktopk.methods import (
    METHODS,
    Candidates,
    Exchanged,
    Method,
    State,
)
from oktopk.settings import Settings, num_kept
from oktopk.sparse import Sparse, acc_dtype, empty
from oktopk.stats import Phase, StepStats
from oktopk.wire.codec import Form

NEVER = 2**62  # steps, or entries
EARLY = frozenset({0, 1, 2, 4, 8, 16})  # sparse steps after which quotas soon grow old


@dataclass(slots=True)
class Step:
    """What lives for one step. The engine takes it over when the step is applied."""

    method: Method
    is_whole_model: bool
    """Whether the whole model is selected and exchanged together, after its last bucket."""

    states: list[State]
    whole: State
    quotas: list[int]
    tally: Tally
    acc: Tensor | None = None
    """Residual plus gradient; what of it was not applied is the next residual."""

    grads: dict[int, Tensor] = field(default_factory=dict)
    """DDP's buckets. They get the averages."""

    riders: dict[int, Tensor] = field(default_factory=dict)
    """By bucket, the gradients that travel dense."""

    held: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of the model without a gradient: their residual is left out of the step."""

    found: Candidates | None = None


class Engine:
    """One model's exchange on one rank: residuals, thresholds, quotas."""

    def __init__(self, settings: Settings, comm: Comm, buckets: list[Bucket]) -> None:
        self.settings = settings
        self.comm = comm
        self.step = 0
        self.skipped = 0
        self.lock = RLock()
        """Held while the state changes; hold it to read several parts of the state together."""

        self._current: Step | None = None
        self.lay_out(buckets)

    def rollback(self) -> None:
        """Forget a step that was begun and not finished, as after an error in backward."""
        self._current = None

    def lay_out(self, buckets: list[Bucket]) -> None:
        """Take on other buckets. What is owed must be carried over by the caller."""
        self.buckets = buckets
        self.starts = list(accumulate((bucket.numel for bucket in buckets), initial=0))
        self.numel = self.starts[-1]
        self.num_dense = sum(bucket.num_dense for bucket in buckets)
        self.groups = grouped(buckets, self._group_numel)
        exact_every = NEVER if self._sets_quotas else self.settings.exact_every
        bounds_every = self.settings.bounds_every
        self.states = [
            State(exact_every=exact_every, bounds_every=bounds_every) for _ in self.groups
        ]
        self.whole = State(exact_every=1, bounds_every=bounds_every)
        self.quotas: list[int] = []
        self.residual: Tensor | None = None
        self._spare: Tensor | None = None
        """Memory for the next `acc`: fresh memory costs a CPU one fault per page."""

    @property
    def phase(self) -> Phase:
        """The phase of the next step."""
        return "dense" if self.settings.is_dense(self.step) else "sparse"

    @property
    def k(self) -> int:
        """Entries the next step is to keep; those that travel dense come on top."""
        if self.phase == "dense":
            return self.numel
        return num_kept(self.numel - self.num_dense, self.settings.density_at(self.step))

    @property
    def waits_for_all(self) -> bool:
        """Whether the next step exchanges the whole model at once, after its last bucket."""
        if self.phase == "dense" or not self._sets_quotas:
            return False
        sparse_step = self.step - self.settings.warmup_steps
        due = sparse_step in EARLY or sparse_step % self.settings.exact_every == 0
        return due or sum(self.quotas) != self.k

    @property
    def _advance(self) -> float:
        return 0.0 if self.phase == "dense" else self.settings.advance_at(self.step)

    @property
    def _group_numel(self) -> int:
        """Entries that are worth an exchange; a method without a scout must see all to choose."""
        if self.settings.scope == "bucket":
            return 1
        scouts = METHODS[self.settings.method].scout is not None
        return self.settings.group_numel if scouts else NEVER

    @property
    def _wire(self) -> Form:
        """At density 1 everything arrives at every step: then it arrives as it is."""
        every = self.phase == "dense" or self.settings.density_at(self.step) == 1
        return "plain" if every else self.settings.wire

    @property
    def _sets_quotas(self) -> bool:
        """Whether groups leave early with a quota that whole steps set."""
        return len(self.groups) > 1 and self.settings.scope == "model"

    def begin(self) -> None:
        """Start a step. One that was begun and never finished is forgotten."""
        if self.phase == "sparse":
            check_indexable([bucket.numel for bucket in self.buckets], self.settings.scope)
        self.comm.alarm = False
        self._current = Step(
            method=METHODS["dense" if self.phase == "dense" else self.settings.method],
            is_whole_model=self.waits_for_all,
            states=[copy(state) for state in self.states],
            whole=copy(self.whole),
            quotas=self.quotas,
            tally=Tally(self.comm.ledger),
        )
        for state in (*self._current.states, self._current.whole):
            state.wire = self._wire

    def feed(self, bucket: int, grad: Tensor) -> None:
        """Take one bucket's gradient; exchange its group now if it is the last of it."""
        step = self._current
        assert step is not None
        step.grads[bucket] = grad
        if step.acc is None and (self.phase == "sparse" or self.residual is not None):
            step.acc = self._new_acc(grad)
        if self.phase == "dense":
            self._move_densely(step, bucket, grad)
            return
        number = next(i for i, group in enumerate(self.groups) if bucket in group)
        group, state = self.groups[number], step.states[number]
        k = self._k_of(number)
        with step.tally.clock("select"):
            self._accumulate(step, bucket, grad, (group, k, state))
        if bucket + 1 == group.stop and not step.is_whole_model:
            self._move(step, group, k, state)

    def finish(self, waited_since: float | None = None) -> StepStats:
        """End the step: apply it on all ranks, or on none. Every bucket must have been fed."""
        step = self._current
        assert step is not None
        if step.is_whole_model:
            self._move(step, range(len(self.buckets)), self.k, step.whole)
            self._set_quotas(step, self.k)
        # sums may overflow though no gradient did; they are the same on all ranks, so all see it
        dtypes = {bucket: grad.dtype for bucket, grad in step.grads.items()}
        divisor = self.comm.size / (1 + self._advance)
        finite = step.tally.survey(dtypes, divisor)
        skipped = self.comm.alarm = self.comm.alarm or not finite
        with step.tally.clock("scatter"):
            if skipped:
                nothing = float("nan") if self.settings.on_nonfinite == "deliver" else 0.0
                for grad in step.grads.values():
                    grad.fill_(nothing)
            else:
                for bucket, exchanged in step.tally.moved.items():
                    self._settle(step, bucket, exchanged)
                self._restore_held(step)
        num_riding = 0 if self.phase == "dense" else self.num_dense
        stats = step.tally.stats(
            step=self.step,
            phase=self.phase,
            numel=self.numel,
            k=self.k + num_riding,
            riding=num_riding,
            skipped=skipped,
            waited_since=waited_since,
            size=self.comm.size,
            itemsize=max((grad.dtype.itemsize for grad in step.grads.values()), default=4),
        )
        self._end(step, skipped)
        return stats

    def _end(self, step: Step, skipped: bool) -> None:
        """The step counts, and unless it was skipped, what it made replaces what was before."""
        with self.lock:
            self.step += 1
            self.skipped += skipped
            self._current = None
            if skipped:
                return
            self.states, self.whole, self.quotas = step.states, step.whole, step.quotas
            if step.acc is not None:
                before, self.residual = self.residual, step.acc
                self._spare = before if step.acc.device.type == "cpu" else None

    def raise_if_asked(self, stats: StepStats) -> None:
        """Raise NonfiniteError after a skipped step, if the settings say so."""
        if stats.skipped and self.settings.on_nonfinite == "raise":
            where = f"rank {self.comm.rank}, step {stats.step}"
            raise NonfiniteError(f"{where}: a gradient had a NaN or Inf on some rank")

    def residual_of(self, bucket: int) -> Tensor | None:
        """A bucket's part of the residual; None before the first sparse step."""
        if self.residual is None:
            return None
        return self.residual[self.starts[bucket] : self.starts[bucket + 1]]

    def rescale(self, factor: float) -> None:
        """All gradients from now on are `factor` times as large: so is what is owed."""
        with self.lock:
            if self.residual is not None:
                self.residual.mul_(factor)
            for state in (*self.states, self.whole):
                state.local = state.local and state.local.scaled(factor)
                state.result = state.result and state.result.scaled(factor)

    def state_dict(self) -> dict[str, Any]:
        """Counters, thresholds, bounds and quotas; the residual is the caller's to name."""
        return {
            "step": self.step,
            "skipped": self.skipped,
            "numels": [bucket.numel for bucket in self.buckets],
            "quotas": list(self.quotas),
            "states": [state.state_dict() for state in self.states],
            "whole": self.whole.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bit-exact for the same groups of buckets; else only the counters are taken over."""
        self.step, self.skipped = state["step"], state["skipped"]
        if not self._has_same_groups(state):
            return
        self.quotas = list(state["quotas"])
        self.whole.load_state_dict(state["whole"])
        for mine, saved in zip(self.states, state["states"], strict=True):
            mine.load_state_dict(saved)

    def _has_same_groups(self, state: dict[str, Any]) -> bool:
        """Whether thresholds, bounds and quotas are for these groups of buckets."""
        if state["numels"] != [bucket.numel for bucket in self.buckets]:
            return False
        if len(state["states"]) != len(self.groups):
            return False
        if len(state["quotas"]) not in (0, len(self.groups)):
            return False
        numels = [self.starts[group.stop] - self.starts[group.start] for group in self.groups]
        pairs = zip((*state["states"], state["whole"]), (*numels, self.numel), strict=True)
        return all(saved["bounds"] is None or saved["bounds"][-1] == n for saved, n in pairs)

    def shared(self) -> str:
        """What must be the same on every rank before a step, in short."""
        text = repr((self.step, self.quotas, [s.shared() for s in [*self.states, self.whole]]))
        return sha256(text.encode()).hexdigest()[:12]

    def _k_of(self, number: int) -> int:
        """Entries that a group is to keep."""
        if self.quotas:
            return self.quotas[number]
        if len(self.groups) == 1:
            return self.k
        return num_kept(self._most(number), self.settings.density_at(self.step))

    def _most(self, number: int) -> int:
        """Entries of a group that travel sparse."""
        return sum(self.buckets[b].numel - self.buckets[b].num_dense for b in self.groups[number])

    def _part(self, acc: Tensor | None, group: range) -> Tensor:
        assert acc is not None
        return acc[self.starts[group.start] : self.starts[group.stop]]

    def _new_acc(self, grad: Tensor) -> Tensor:
        """Memory for residual plus gradient of the whole model; the residual is there from now."""
        if self.residual is None:
            self.residual = torch.zeros(self.numel, dtype=acc_dtype(grad), device=grad.device)
        spare = self._spare
        fits = spare is not None and (spare.shape, spare.dtype, spare.device) == (
            self.residual.shape,
            self.residual.dtype,
            self.residual.device,
        )
        return spare if fits and spare is not None else torch.empty_like(self.residual)

    def _accumulate(
        self, step: Step, bucket: int, grad: Tensor, chosen: tuple[range, int, State]
    ) -> None:
        """Add a bucket's gradient to its residual, and look for candidates of its group."""
        group, k, state = chosen
        residual = self.residual_of(bucket)
        acc = self._part(step.acc, range(bucket, bucket + 1))
        assert residual is not None
        wide = self._prepared(step, bucket, grad, residual)
        if bucket == group.start and step.method.scout is not None and not step.is_whole_model:
            step.found = step.method.scout(self._part(step.acc, group), k, state)
        if step.found is None:
            torch.add(residual, wide, out=acc)
        else:
            step.found.find(residual, wide, acc)

    def _prepared(self, step: Step, bucket: int, grad: Tensor, residual: Tensor) -> Tensor:
        """The gradient in the residual's dtype, without what travels dense or must be left out."""
        ranges = self.buckets[bucket].dense
        # with what is owed, as of a parameter that traveled sparse when the state was saved
        parts = [grad[s:e].to(residual.dtype) + residual[s:e] for s, e in ranges]
        step.riders[bucket] = torch.cat(parts) if parts else residual[:0]
        wide = grad.to(residual.dtype)
        for start, end in ranges:  # acc is made 0: so they are never selected, and owe nothing
            wide[start:end] = -residual[start:end]
        # DDP delivers nothing to a parameter that no rank used: its residual must stay here, so
        # acc is made 0, of which nothing can be selected
        for start, end in self.buckets[bucket].may_be_unused:
            if not grad[start:end].any():
                wide[start:end] = -residual[start:end]
                step.held.append((self.starts[bucket] + start, self.starts[bucket] + end))
        return wide

    def _inspected(self, local: Sparse, k: int, acc: Tensor, rider: Tensor) -> Sparse:
        """Raise the alarm at a NaN or Inf, and offer nothing then.

        A NaN or Inf is larger than every number, so a selection of any entries has it: no pass over
        n is needed unless there was nothing to select.
        """
        finite, _ = kernels.survey([local.values if k else acc, rider])
        self.comm.alarm = self.comm.alarm or not finite
        return local if finite else empty(local.numel, acc)

    def _move_densely(self, step: Step, bucket: int, grad: Tensor) -> None:
        with step.tally.clock("select"):
            acc = grad.to(acc_dtype(grad))
            owed = self.residual_of(bucket)
            if owed is not None:  # what a sparse phase before this one still owes
                acc = acc + owed
            local = step.method.select(acc, acc.numel(), step.whole, None)
        with step.tally.clock("exchange"):
            args = local, local.values[:0], local.num, step.whole, self.comm
            step.tally.moved[bucket] = step.method.exchange(*args)

    def _move(self, step: Step, group: range, k: int, state: State) -> None:
        """Select and exchange a group, then hand every bucket its part."""
        with step.tally.clock("select"):
            acc = self._part(step.acc, group)
            local = step.method.select(acc, k, state, step.found)
            rider = torch.cat([step.riders[bucket] for bucket in group])
            local = self._inspected(local, k, acc, rider)
        with step.tally.clock("exchange"):
            exchanged = step.method.exchange(local, rider, k, state, self.comm)
            step.tally.moved |= by_bucket(exchanged, group, self.buckets)

    def _set_quotas(self, step: Step, k: int) -> None:
        """Share k as the result was shared; every group starts at the model's thresholds."""
        counts = [sum(step.tally.moved[b].result.num for b in group) for group in self.groups]
        most = [self._most(number) for number in range(len(self.groups))]
        step.quotas = share_out(k, counts, most)
        for state in step.states:
            state.local, state.result = step.whole.local, step.whole.result

    def _settle(self, step: Step, bucket: int, exchanged: Exchanged) -> None:
        grad = step.grads[bucket]
        acc = None if step.acc is None else self._part(step.acc, range(bucket, bucket + 1))
        settle_(grad, acc, exchanged, self.comm.size, self._advance)
        ranges = self.buckets[bucket].dense if self.phase == "sparse" else ()
        sums = exchanged.rider.split([end - start for start, end in ranges]) if ranges else ()
        for (start, end), total in zip(ranges, sums, strict=True):
            grad[start:end] = total / self.comm.size

    def _restore_held(self, step: Step) -> None:
        for start, end in step.held:
            assert step.acc is not None and self.residual is not None
            step.acc[start:end] += self.residual[start:end]
