"""One row: a contender's steps on this network, timed on all ranks together."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from oktopk.bench.baselines import CONTENDERS, DENSE, FLOOR
from oktopk.bench.stream import Stream
from oktopk.comm.communicator import Comm
from oktopk.stats import StepStats

FEWEST, MOST = 3, 30  # steps of a row
SETTLE = 2.0  # seconds to settle in, in those of a row; DDP must have its two steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a contender took on a network. Times are of the slowest rank of each step."""

    method: str
    rate: str
    workers: int
    numel: int
    density: float
    steps: int
    ms_per_step: float
    """The median."""

    ms_low: float
    """A quarter of the steps took less."""

    ms_high: float
    """A quarter of the steps took more."""

    ms_above_noop: float = 0.0
    ratio_to_dense: float | None = None
    """`ms_above_noop` over that of DDP's own allreduce in the same run."""

    bytes_sent: int = 0
    """By a rank in a step, from the ledger (for the hooks of PyTorch: by their algorithm)."""

    bytes_on_interface: int | None = None
    """The same from the kernel's counters: with TCP's and Ethernet's own bytes."""

    bits_per_kept: float | None = None
    """Bits sent per entry sent, headers included; None where everything is sent."""

    parts: dict[str, float] = field(default_factory=dict)
    """Milliseconds of select, exchange and scatter, the mean of steps on rank 0."""

    as_dict = asdict


def measure(
    name: str,
    stream: Stream,
    comm: Comm,
    *,
    rate: str,
    seconds: float,
    settings: dict[str, Any],
    counter: Callable[[], int | None],
) -> Row:
    """Run one contender; every rank must call it. The same row on every rank, but for `parts`."""
    contender = CONTENDERS[name]
    model = DistributedDataParallel(
        stream,
        init_sync=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=contender.bucket_mb,  # type: ignore[arg-type] - None is as DDP does it
    )
    handle = contender.hook(model, settings)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        begun = perf_counter()
        model().backward()
        return perf_counter() - begun

    _repeat(step, comm, fewest=2, most=contender.settles, seconds=SETTLE * seconds)
    seen: list[StepStats] = []
    if handle is not None:
        handle.on_step = seen.append
    before = counter()
    times = _repeat(step, comm, fewest=FEWEST, most=MOST, seconds=seconds)
    after = counter()
    if handle is not None:
        handle.close()
    sent, entries = _sent(seen, contender.sent(stream.shapes, comm.size), comm)
    on_interface = None
    if before is not None and after is not None:
        passed = _gathered(torch.tensor(after - before), comm).sum()
        on_interface = int(passed) // comm.size // len(times)
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return Row(
        method=name,
        rate=rate,
        workers=comm.size,
        numel=stream.numel,
        density=settings["density"],
        steps=len(times),
        ms_per_step=1e3 * middle,
        ms_low=1e3 * low,
        ms_high=1e3 * high,
        bytes_sent=sent,
        bytes_on_interface=on_interface,
        bits_per_kept=8 * sent / entries if entries else None,
        parts=_parts(seen),
    )


def compared(row: Row, others: list[Row]) -> Row:
    """The row with its distance to the floor and its ratio to dense, where those are known."""
    here = {other.method: other for other in [*others, row] if other.rate == row.rate}
    if FLOOR not in here:
        return row
    floor = here[FLOOR].ms_per_step
    above = row.ms_per_step - floor
    ratio = None
    if DENSE in here and row.method != FLOOR and here[DENSE].ms_per_step > floor:
        ratio = above / (here[DENSE].ms_per_step - floor)
    return replace(row, ms_above_noop=above, ratio_to_dense=ratio)


def _repeat(
    step: Callable[[], float], comm: Comm, *, fewest: int, most: int, seconds: float
) -> list[float]:
    """Steps until there are enough: as all ranks decide together. The slowest rank's seconds."""
    times: list[float] = []
    begun = perf_counter()
    while True:
        passed = int(1e3 * (perf_counter() - begun))
        # also a barrier: every step begins at once
        rank_0 = comm.all_gather_size(passed, torch.device("cpu"), stage="bench")[0]
        if len(times) >= most or (len(times) >= fewest and rank_0 >= 1e3 * seconds):
            break
        times.append(step())
    return _gathered(torch.tensor(times, dtype=torch.float64), comm).amax(0).tolist()


def _sent(seen: list[StepStats], by_algorithm: int, comm: Comm) -> tuple[int, int]:
    """Bytes and entries that a rank sent in a step: means over steps and ranks."""
    bytes_sent = sum(stats.bytes_sent for stats in seen)
    entries = sum(stats.entries_sent for stats in seen if stats.phase == "sparse")
    total = _gathered(torch.tensor([bytes_sent, entries]), comm).sum(0) // comm.size
    if not seen:
        return by_algorithm, 0
    return int(total[0]) // len(seen), int(total[1]) // len(seen)


def _gathered(x: Tensor, comm: Comm) -> Tensor:
    return comm.all_gather(x, stage="bench")


def _parts(seen: list[StepStats]) -> dict[str, float]:
    if not seen:
        return {}
    return {
        part: 1e3 * statistics.mean(getattr(stats, part) for stats in seen)
        for part in ("select", "exchange", "scatter")
    }
