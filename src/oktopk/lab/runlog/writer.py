# SPDX-License-Identifier: Apache-2.0
"""What a run records: lines of JSON, sums by phase, and histograms."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from oktopk.comm.communicator import Comm
from oktopk.exchange.saved_state import taken_over
from oktopk.lab.runlog.reader import RunLog
from oktopk.lab.runlog.schema import (
    Histogram,
    PhaseTotals,
    Record,
    RunRecord,
    StepRecord,
    TensorsRecord,
)
from oktopk.stats import PHASES, Phase

# `RunLogWriter`: appends records to `metrics.jsonl`, one line of JSON for each.


log = logging.getLogger("oktopk.lab.runlog")


class RunLogWriter:
    """Appends records to a file after its first `start` bytes.

    A resumed run continues at the byte that its checkpoint names: what was written after the
    checkpoint is cut off, because the run writes it again.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        written = path.read_bytes()[:start] if path.exists() else b""
        complete = written[: written.rfind(b"\n") + 1]  # the last line may be unfinished
        if len(complete) < start:
            log.warning(
                "%s is damaged: it has %d of the %d bytes that were in it at the checkpoint. The "
                "training is not affected; the steps that were in the rest are missing from "
                "reports",
                path,
                len(complete),
                start,
            )
        self._file = path.open("a")
        self._file.truncate(len(complete))
        self._file.seek(len(complete))  # else the old end is reported until something is written

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self._file.tell()

    def write(self, *records: Record) -> None:
        """Write all records and flush them to the operating system."""
        self._file.write("".join(encode(record) for record in records))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def encode(record: Record) -> str:
    """The line of a record. Numbers that are not finite become null, as JSON has no others."""
    return json.dumps(_finite(msgspec.to_builtins(record)), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Steps, bytes and time of a run, by phase.


State = list[list[int]]
"""The totals of one rank in a checkpoint: the fields of `PhaseTotals` for every phase."""


class RunTotals(dict[Phase, PhaseTotals]):
    """Sums by phase, of one rank or of all."""

    def __init__(self) -> None:
        super().__init__({phase: PhaseTotals() for phase in PHASES})

    def add(self, step: StepRecord) -> None:
        """Count one finished step."""
        sums = self[step.phase]
        sums.steps += 1
        sums.skipped += bool(step.skipped)
        sums.bytes_sent += step.bytes_sent
        sums.bytes_dense += step.bytes_dense
        sums.result += int(step.result or 0)
        sums.numel += step.numel or 0
        sums.microseconds += round((step.whole or 0.0) * 1e6)

    @property
    def whole(self) -> PhaseTotals:
        """The sums over both phases."""
        columns = zip(*(msgspec.structs.astuple(sums) for sums in self.values()), strict=True)
        return PhaseTotals(*map(sum, columns))

    def set_bytes(self, others: Sequence[RunTotals]) -> None:
        """Take the bytes from the sum of other totals; steps and time stay as they are."""
        for phase, sums in self.items():
            sums.bytes_sent = sum(other[phase].bytes_sent for other in others)
            sums.bytes_dense = sum(other[phase].bytes_dense for other in others)

    def state(self) -> State:
        """The totals as plain values, for a checkpoint."""
        return [list(msgspec.structs.astuple(sums)) for sums in self.values()]


def load_totals(state: State) -> RunTotals:
    """The totals that a checkpoint holds for one rank."""
    totals = RunTotals()
    totals.update(zip(PHASES, (PhaseTotals(*values) for values in state), strict=True))
    return totals


def reshard_totals(states: Sequence[State], rank: int, world_size: int) -> RunTotals:
    """Totals of `rank` after a change of world size: the bytes summed over ranks stay the same."""
    totals = load_totals(states[0])
    totals.set_bytes([load_totals(state) for state in taken_over(states, rank, world_size)])
    return totals


def sum_over_ranks(totals: RunTotals, comm: Comm, device: torch.device) -> RunTotals:
    """The totals of this rank with the bytes of all ranks. Collective."""
    own = torch.tensor(totals.state(), dtype=torch.int64, device=device)
    summed = load_totals(totals.state())
    summed.set_bytes([load_totals(comm.all_gather_header(own, stage="run").sum(0).tolist())])
    return summed


def totals_of_rank_0(runlog: RunLog) -> RunTotals:
    """Sums over the recorded steps."""
    totals = RunTotals()
    for step in runlog.steps:
        totals.add(step)
    return totals


def totals_of_all_ranks(runlog: RunLog) -> RunTotals | None:
    """Sums over all ranks, which only a finished run has recorded."""
    if runlog.end is None or not runlog.end.totals:
        return None
    totals = RunTotals()
    totals.update(runlog.end.totals)
    return totals


def estimated_totals(runlog: RunLog) -> RunTotals:
    """Sums over all ranks. An unfinished run counts as if all ranks had sent what rank 0 sent."""
    recorded = totals_of_all_ranks(runlog)
    if recorded is not None:
        return recorded
    totals = totals_of_rank_0(runlog)
    totals.set_bytes([totals_of_rank_0(runlog)] * (runlog.info.size or 1))
    return totals


def cumulative_bytes(runlog: RunLog) -> list[float]:
    """Bytes that all ranks sent up to each step.

    Steps record the bytes of rank 0. Ranks may send different amounts (in a tree they do), but the
    share of rank 0 hardly changes within a phase: its bytes are scaled to the total of the phase.
    """
    whole, own = estimated_totals(runlog), totals_of_rank_0(runlog)
    scale = {p: whole[p].bytes_sent / own[p].bytes_sent for p in PHASES if own[p].bytes_sent}
    return list(accumulate(step.bytes_sent * scale.get(step.phase, 0) for step in runlog.steps))


def cumulative_minutes(runlog: RunLog) -> list[float]:
    """Minutes that the steps took up to each of them, without validation."""
    return [seconds / 60 for seconds in accumulate(step.whole or 0.0 for step in runlog.steps)]


def steady_steps(runlog: RunLog) -> list[StepRecord]:
    """The steps without those that connect and allocate.

    Left out is the first step of each phase, and the first after each start or resume.
    """
    started = {run.step for run in runlog.of(RunRecord)}
    phases = [step.phase for step in runlog.steps]
    previous = [None, *phases]
    return [
        step
        for step, phase, before in zip(runlog.steps, phases, previous, strict=False)
        if phase == before and step.step not in started
    ]


# Magnitudes of a tensor as a histogram of few numbers, small enough for a line of JSON.


MIN_EXPONENT, MAX_EXPONENT, BINS_PER_DECADE = -14, 6, 4
NUM_BINS = (MAX_EXPONENT - MIN_EXPONENT) * BINS_PER_DECADE
"""Bins of |x| from 1e-14 to 1e6. The outermost bins also count what lies beyond them."""


def histogram(x: Tensor) -> Histogram:
    """Count |x| in bins of equal ratio, and count the zeros. O(n), with one copy of x."""
    magnitudes = x.detach().flatten().abs()
    zeros = int((magnitudes == 0).sum())
    logs = magnitudes[magnitudes > 0].double().log10_()
    bins = ((logs - MIN_EXPONENT) * BINS_PER_DECADE).floor_().clamp_(0, NUM_BINS - 1).long()
    counts = torch.bincount(bins, minlength=NUM_BINS).tolist()
    used = [i for i, count in enumerate(counts) if count]
    first, last = (used[0], used[-1] + 1) if used else (0, 0)
    return Histogram(zeros, first, counts[first:last])


def bin_edges(first: int, num: int) -> list[float]:
    """The `num` + 1 edges of the bins from `first` on."""
    return [10 ** (MIN_EXPONENT + (first + i) / BINS_PER_DECADE) for i in range(num + 1)]


def tensors_record(
    step: int, gradients: dict[str, Tensor], residuals: dict[str, Tensor]
) -> TensorsRecord:
    """How many entries of each tensor were exchanged, and norms and histograms."""
    groups = {"gradient": gradients, "residual": residuals}
    return TensorsRecord(
        step=step,
        kept={name: int(torch.count_nonzero(grad)) for name, grad in gradients.items()},
        of={name: grad.numel() for name, grad in gradients.items()},
        spread={
            name: histogram(torch.cat([tensor.flatten() for tensor in tensors.values()]))
            for name, tensors in groups.items()
            if tensors
        },
        norm={name: grad.norm().item() for name, grad in gradients.items()},
        residual_norm={name: residual.norm().item() for name, residual in residuals.items()},
    )
