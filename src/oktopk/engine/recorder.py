"""`Tally`: what a step has done so far, and its statistics in the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.ledger import Ledger, Traffic, dense_allreduce
from oktopk.methods import Exchanged
from oktopk.sparse import Sparse
from oktopk.stats import StepStats


class Tally:
    """What the buckets exchanged, the seconds, and the ledger since the step began."""

    def __init__(self, ledger: Ledger) -> None:
        self.moved: dict[int, Exchanged] = {}
        self._ledger = ledger
        self._before = ledger.snapshot()
        self._start = perf_counter()
        self._seconds: dict[str, Any] = {"select": 0.0, "exchange": 0.0, "scatter": 0.0}
        self._thresholds = [0.0, 0.0]

    @contextmanager
    def clock(self, what: str) -> Iterator[None]:
        """Add the seconds of a block to `select`, `exchange` or `scatter`."""
        start = perf_counter()
        yield
        self._seconds[what] += perf_counter() - start

    def survey(self, dtypes: dict[int, torch.dtype], divisor: float) -> bool:
        """Whether all sums are finite, and their averages in the dtype of their bucket.

        Notes the thresholds too, so that the host waits once; to be called before results are
        settled, since a dense one is the gradient's own memory.
        """
        sums = []
        for bucket, exchanged in self.moved.items():
            for part in (exchanged.result.values, exchanged.rider):
                # an average is finite if its sum is, unless it is delivered in fewer bits
                same = part.dtype == dtypes[bucket]
                sums.append(part if same else (part / divisor).to(dtypes[bucket]))
        moved = self.moved.values()
        finite, self._thresholds = kernels.survey(
            sums, _kept([e.offered for e in moved]), _kept([e.result for e in moved])
        )
        return finite

    def stats(
        self, *, size: int, itemsize: int, riding: int, waited_since: float | None, **facts: Any
    ) -> StepStats:
        """The statistics; `riding` entries travelled dense, beside the selected ones."""
        traffic = self._ledger.since(self._before)
        total = sum(traffic.values(), Traffic())
        moved = self.moved.values()
        applied = not facts["skipped"]
        return StepStats(
            **facts,
            local=sum(e.offered.num for e in moved) + riding,
            result=(sum(e.result.num for e in moved) + riding) * applied,
            local_threshold=self._thresholds[0],
            global_threshold=self._thresholds[1],
            imbalance=max((e.imbalance for e in moved), default=1.0),
            bytes_sent=total.sent,
            bytes_header=total.header_sent,
            bytes_received=total.received,
            bytes_dense=dense_allreduce(facts["numel"] * itemsize, size).sent,
            entries_sent=sum(e.sent for e in moved),
            messages=total.messages_sent,
            stages={stage: part for stage, part in traffic.items() if part != Traffic()},
            **self._seconds,
            exposed=perf_counter() - (self._start if waited_since is None else waited_since),
        )


def _kept(parts: list[Sparse]) -> list[Tensor]:
    """The values whose smallest magnitude is the threshold in effect; none if all are kept."""
    return [part.values for part in parts if part.indices is not None and part.num]
