# SPDX-License-Identifier: Apache-2.0
"""`StepRecorder`: times and byte counts of one step, and its statistics in the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.ledger import Ledger, Traffic, dense_allreduce
from oktopk.engine.plan import StepPlan
from oktopk.methods.base import DenseSum, SparseSum
from oktopk.stats import StepStats

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
