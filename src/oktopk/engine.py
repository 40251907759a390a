"""The five moves over a gradient that arrives in buckets.

`feed` takes a bucket the moment it is ready; `finish` ends the step. In the sparse phase a bucket
is added to what is owed, and candidates are found, at once; a group of buckets is exchanged when
its last one has come (`Settings.group_numel`). Several groups have quotas of the model's k entries,
which come from steps in which the whole model is selected and exchanged together: the
exact-threshold steps of `oktopk`, more often right after the sparse phase began. The other sparse
methods must see everything to choose, so in scope "model" the whole model is their group.

Nothing is applied before every bucket has been exchanged and no rank has raised the alarm, so a
step with a NaN can be undone on all ranks. Until then a bucket holds what its residual was.
"""

from __future__ import annotations

from copy import copy
from hashlib import sha256
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm import Comm
from oktopk.feedback import settle_
from oktopk.layout import Bucket, by_bucket, grouped, share_out
from oktopk.methods import METHODS, Candidates, Exchanged, Method, State
from oktopk.settings import Settings, num_kept
from oktopk.sparse import Sparse, acc_dtype, empty
from oktopk.stats import Phase, StepStats
from oktopk.tally import Tally
from oktopk.undo import Undo
from oktopk.wire import Form

NEVER = 2**62  # steps, or entries
EARLY = frozenset({0, 1, 2, 4, 8, 16})  # sparse steps after which quotas soon grow old


class NonfiniteError(FloatingPointError):
    """A gradient had a NaN or Inf on some rank, and the user asked to be told by an error."""


class Engine:
    """One model's exchange on one rank: residuals, thresholds, quotas."""

    def __init__(self, settings: Settings, comm: Comm, buckets: list[Bucket]) -> None:
        self.settings = settings
        self.comm = comm
        self.step = 0
        self.skipped = 0
        self._open = False
        self.lay_out(buckets)

    def abandon(self) -> None:
        """Undo a step that was begun and not finished, as after an error in backward."""
        if self._open:
            self._put_back()

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
        """Start a step. One that was begun and never finished is undone first."""
        self.abandon()
        self.comm.alarm = False
        self._method: Method = METHODS["dense" if self.phase == "dense" else self.settings.method]
        self._whole_step = self.waits_for_all
        for state in (*self.states, self.whole):
            state.wire = self._wire
        self._saved = [copy(state) for state in self.states], copy(self.whole), self.quotas
        self._undo = Undo()
        self._grads: dict[int, Tensor] = {}
        self._riders: dict[int, Tensor] = {}
        self._found: Candidates | None = None
        self._tally = Tally(self.comm.ledger)
        self._open = True

    def feed(self, bucket: int, grad: Tensor) -> None:
        """Take one bucket's gradient; exchange its group now if it is the last of it."""
        self._grads[bucket] = grad
        if self.phase == "dense":
            self._move_densely(bucket, grad)
            return
        number = next(i for i, group in enumerate(self.groups) if bucket in group)
        group, state = self.groups[number], self.states[number]
        k = self._k_of(number)
        with self._tally.clock("select"):
            residual, wide = self._prepared(bucket, grad)
            self._undo.accumulated(residual, wide)
            if bucket == group.start and self._method.scout is not None and not self._whole_step:
                self._found = self._method.scout(self._acc_of(group), k, state)
            if self._found is None:
                kernels.accumulate_(residual, wide)
            else:
                self._found.find(residual, wide)
        if bucket + 1 == group.stop and not self._whole_step:
            self._move(group, k, state)

    def finish(self, waited_since: float | None = None) -> StepStats:
        """End the step: apply it on all ranks, or on none. Every bucket must have been fed."""
        if self._whole_step:
            self._move(range(len(self.buckets)), self.k, self.whole)
            self._set_quotas(self.k)
        # sums may overflow though no gradient did; they are the same on all ranks, so all see it
        dtypes = {bucket: grad.dtype for bucket, grad in self._grads.items()}
        divisor = self.comm.size / (1 + self._advance)
        finite = self._tally.survey(dtypes, divisor)
        skipped = self.comm.alarm = self.comm.alarm or not finite
        with self._tally.clock("scatter"):
            if skipped:
                self._skip()
            else:
                for bucket, exchanged in self._tally.moved.items():
                    self._settle(bucket, exchanged)
                self._undo.release()
        self._open = False
        num_riding = 0 if self.phase == "dense" else self.num_dense
        stats = self._tally.stats(
            step=self.step,
            phase=self.phase,
            numel=self.numel,
            k=self.k + num_riding,
            riding=num_riding,
            skipped=skipped,
            waited_since=waited_since,
            size=self.comm.size,
            itemsize=max((grad.dtype.itemsize for grad in self._grads.values()), default=4),
        )
        self.step += 1
        return stats

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
        same_buckets = state["numels"] == [bucket.numel for bucket in self.buckets]
        if not same_buckets or len(state["states"]) != len(self.groups):
            return
        self.quotas = list(state["quotas"])
        self.whole.load_state_dict(state["whole"])
        for mine, saved in zip(self.states, state["states"], strict=True):
            mine.load_state_dict(saved)

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

    def _acc_of(self, group: range) -> Tensor:
        assert self.residual is not None
        return self.residual[self.starts[group.start] : self.starts[group.stop]]

    def _prepared(self, bucket: int, grad: Tensor) -> tuple[Tensor, Tensor]:
        """A bucket's residual and gradient, ready to accumulate; the riders are taken off."""
        if self.residual is None:
            self.residual = torch.zeros(self.numel, dtype=acc_dtype(grad), device=grad.device)
        residual, ranges = self.residual_of(bucket), self.buckets[bucket].dense
        assert residual is not None
        parts = [grad[start:end].to(residual.dtype, copy=True) for start, end in ranges]
        self._riders[bucket] = torch.cat(parts) if parts else residual[:0]
        for start, end in ranges:  # so they are never selected, and owe nothing
            grad[start:end] = 0
        # DDP delivers nothing to a parameter that no rank used: what is owed to it would be lost
        for start, end in self.buckets[bucket].may_be_unused:
            if not grad[start:end].any():
                self._undo.hold(residual[start:end])
        return residual, grad.to(residual.dtype)

    def _inspected(self, local: Sparse, k: int, acc: Tensor, rider: Tensor) -> Sparse:
        """Raise the alarm at a NaN or Inf, and offer nothing then.

        A NaN or Inf is larger than every number, so a selection of any entries has it: no pass over
        n is needed unless there was nothing to select.
        """
        finite, _ = kernels.survey([local.values if k else acc, rider])
        self.comm.alarm = self.comm.alarm or not finite
        return local if finite else empty(local.numel, acc)

    def _move_densely(self, bucket: int, grad: Tensor) -> None:
        with self._tally.clock("select"):
            acc = grad.to(acc_dtype(grad))
            owed = self.residual_of(bucket)
            if owed is not None:  # what a sparse phase before this one still owes
                acc = acc + owed
            local = self._method.select(acc, acc.numel(), self.whole, None)
        with self._tally.clock("exchange"):
            args = local, local.values[:0], local.num, self.whole, self.comm
            self._tally.moved[bucket] = self._method.exchange(*args)

    def _move(self, group: range, k: int, state: State) -> None:
        """Select and exchange a group, then hand every bucket its part."""
        with self._tally.clock("select"):
            acc = self._acc_of(group)
            local = self._method.select(acc, k, state, self._found)
            rider = torch.cat([self._riders[bucket] for bucket in group])
            local = self._inspected(local, k, acc, rider)
        with self._tally.clock("exchange"):
            exchanged = self._method.exchange(local, rider, k, state, self.comm)
            self._tally.moved |= by_bucket(exchanged, group, self.buckets)

    def _set_quotas(self, k: int) -> None:
        """Share k as the result was shared; every group starts at the model's thresholds."""
        counts = [sum(self._tally.moved[b].result.num for b in group) for group in self.groups]
        most = [self._most(number) for number in range(len(self.groups))]
        self.quotas = share_out(k, counts, most)
        for state in self.states:
            state.local, state.result = self.whole.local, self.whole.result

    def _settle(self, bucket: int, exchanged: Exchanged) -> None:
        grad = self._grads[bucket]
        settle_(grad, self.residual_of(bucket), exchanged, self.comm.size, self._advance)
        ranges = self.buckets[bucket].dense if self.phase == "sparse" else ()
        sums = exchanged.rider.split([end - start for start, end in ranges]) if ranges else ()
        for (start, end), total in zip(ranges, sums, strict=True):
            grad[start:end] = total / self.comm.size

    def _skip(self) -> None:
        """Leave everything as it was before the step, to the bit."""
        self.skipped += 1
        self._put_back()
        for grad in self._grads.values():
            grad.fill_(float("nan") if self.settings.on_nonfinite == "deliver" else 0.0)

    def _put_back(self) -> None:
        self._undo.put_back()
        self.states, self.whole, self.quotas = self._saved
        self._open = False
