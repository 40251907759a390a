# SPDX-License-Identifier: Apache-2.0
"""Measure one case on this network: steps that all ranks take together."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from oktopk.bench.baselines import CASES, DENSE, NOOP, BenchSettings
from oktopk.bench.stream import Stream
from oktopk.comm.communicator import Comm
from oktopk.stats import StepStats

MIN_STEPS, MAX_STEPS = 3, 30  # of a row
SETTLING = 2.0  # the limit for settling steps, in multiples of the seconds of a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a case took on a network. Times are of the slowest rank of each step."""

    method: str
    rate: str
    workers: int
    numel: int
    density: float
    steps: int
    ms_per_step: float
    """The median of the steps."""

    ms_low: float
    """A quarter of the steps took less."""

    ms_high: float
    """A quarter of the steps took more."""

    ms_above_noop: float = 0.0
    ratio_to_dense: float | None = None
    """`ms_above_noop` over that of DDP's own allreduce in the same run."""

    every: int = 1
    """Training steps for each exchange; times and bytes are those of an exchange."""

    bytes_sent: int = 0
    """Sent by a rank in an exchange, from the ledger; for baselines by their algorithm."""

    bytes_on_interface: int | None = None
    """The same from the kernel's counters, with the headers of TCP and Ethernet."""

    bits_per_kept: float | None = None
    """Bits sent per entry sent, headers included; None where everything is sent."""

    parts: dict[str, float] = field(default_factory=dict)
    """Milliseconds of select, exchange and scatter: the mean over steps, on rank 0."""

    as_dict = asdict


def measure(
    name: str,
    stream: Stream,
    comm: Comm,
    *,
    rate: str,
    seconds: float,
    settings: BenchSettings,
    every: int,
    counter: Callable[[], int | None],
) -> Row:
    """Measure one case. Every rank must call it, and gets the same row except for `parts`."""
    case = CASES[name]
    started = case.start(stream, settings)
    step, handle = started.step, started.handle
    _repeat(step, comm, fewest=2, most=case.settling_steps, seconds=SETTLING * seconds)
    stats: list[StepStats] = []
    if handle is not None:
        handle.on_step = stats.append
    before = counter()
    times = _repeat(step, comm, fewest=MIN_STEPS, most=MAX_STEPS, seconds=seconds)
    after = counter()
    if handle is not None:
        handle.close()
    on_interface = _sent_on_interface(before, after, len(times), comm)
    sent, entries = _sent(stats, started.bytes_sent, comm)
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return Row(
        method=name,
        rate=rate,
        workers=comm.size,
        numel=stream.numel,
        density=settings.density,
        steps=len(times),
        ms_per_step=1e3 * middle,
        ms_low=1e3 * low,
        ms_high=1e3 * high,
        every=every if case.is_local else 1,
        bytes_sent=sent,
        bytes_on_interface=on_interface,
        bits_per_kept=8 * sent / entries if entries else None,
        parts=_parts(stats),
    )


def _sent_on_interface(
    before: int | None, after: int | None, num_steps: int, comm: Comm
) -> int | None:
    """Return the bytes a rank sent in a step, from two readings of the kernel's counter."""
    if before is None or after is None:
        return None
    total = _gathered(torch.tensor(after - before), comm).sum()
    return int(total) // comm.size // num_steps


def compared(row: Row, others: list[Row]) -> Row:
    """Return the row with its time above the no-op and its ratio to dense, where known."""
    here = {other.method: other for other in [*others, row] if other.rate == row.rate}
    if NOOP not in here:
        return row
    noop = here[NOOP].ms_per_step
    above = row.ms_per_step - noop
    ratio = None
    if DENSE in here and row.method != NOOP and here[DENSE].ms_per_step > noop:
        ratio = above / (here[DENSE].ms_per_step - noop)
    return replace(row, ms_above_noop=above, ratio_to_dense=ratio)


def _repeat(
    step: Callable[[], float], comm: Comm, *, fewest: int, most: int, seconds: float
) -> list[float]:
    """Take steps until rank 0's time is up; return the slowest rank's seconds for each step."""
    times: list[float] = []
    begun = perf_counter()
    while True:
        passed = int(1e3 * (perf_counter() - begun))
        # also a barrier: all ranks begin each step together
        rank_0 = comm.all_gather_size(passed, torch.device("cpu"), stage="bench")[0]
        if len(times) >= most or (len(times) >= fewest and rank_0 >= 1e3 * seconds):
            break
        times.append(step())
    return _gathered(torch.tensor(times, dtype=torch.float64), comm).amax(0).tolist()


def _sent(seen: list[StepStats], by_algorithm: int, comm: Comm) -> tuple[int, int]:
    """Return the bytes and entries that a rank sent in a step, as means over steps and ranks."""
    bytes_sent = sum(stats.bytes_sent for stats in seen)
    entries = sum(stats.entries_sent for stats in seen if stats.phase == "sparse")
    total = _gathered(torch.tensor([bytes_sent, entries]), comm).sum(0) // comm.size
    if not seen:
        return by_algorithm, 0
    return int(total[0]) // len(seen), int(total[1]) // len(seen)


def _gathered(x: Tensor, comm: Comm) -> Tensor:
    return comm.all_gather_header(x, stage="bench")


def _parts(seen: list[StepStats]) -> dict[str, float]:
    if not seen:
        return {}
    return {
        part: 1e3 * statistics.mean(getattr(stats, part) for stats in seen)
        for part in ("select", "exchange", "scatter")
    }
