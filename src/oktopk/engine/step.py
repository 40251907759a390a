# SPDX-License-Identifier: Apache-2.0
"""`Step`: the five moves of an exchange, over a gradient that arrives in buckets.

A step works on copies: it writes `acc = residual + gradient` to a buffer of its own and updates
copies of the method states. The engine takes them over, all at once, when every bucket has been
exchanged and no rank had a NaN. So a step that ends early, for whatever reason, is rolled back by
dropping it, and a state dict that is taken meanwhile is the one before the step.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.engine.buckets import Buckets, by_bucket
from oktopk.engine.plan import GroupPlan, StepPlan
from oktopk.engine.recorder import StepRecorder
from oktopk.engine.residual import apply_dense_, apply_sparse_
from oktopk.engine.shards import UNSHARDED, Shards
from oktopk.methods import dense
from oktopk.methods.base import Method, SparseMethod, SparseSum
from oktopk.methods.candidates import Candidates
from oktopk.methods.state import MethodState
from oktopk.sparse import Sparse, acc_dtype, empty

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
