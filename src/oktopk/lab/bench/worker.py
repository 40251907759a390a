# SPDX-License-Identifier: Apache-2.0
"""A worker of the bench: cases at every rate, simulated ranks, and the results as a table."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from oktopk.adapters.local_driver import SHARED_METHOD
from oktopk.comm.communicator import Comm
from oktopk.comm.simulated import SimulatedGroup, SimulatedTransport, simulate
from oktopk.comm.torch_transport import TorchTransport
from oktopk.exchange.reducer import Reducer
from oktopk.lab.baselines.local import num_words
from oktopk.lab.bench.bench import advise
from oktopk.lab.bench.measure import (
    DENSE,
    NOOP,
    BenchSettings,
    Row,
    Stream,
    compared,
    gradients,
    measure,
    shapes_of,
)
from oktopk.launch import network
from oktopk.methods import METHODS, probe_kernels, probe_link
from oktopk.methods.base import KernelSpeed, Link, Work
from oktopk.methods.ok_topk import is_short
from oktopk.settings import num_kept
from oktopk.utils.console import TimeLeft
from oktopk.wire import CodecName

# `oktopk bench --simulate P`: the same method code on more ranks than there are machines.
#
# The ranks are threads of one process. The bytes that they send are counted, and converted to time
# by the latency and bandwidth of a link. A simulated gradient is smaller than the real one: its
# payload is scaled up, its headers are not. For more ranks than can be simulated, the method's
# cost model is used instead (`methods.cost_model`).


MAX_SIMULATED = {"topka": 32, "oktopk": 256}  # ranks; with topka every rank reads all entries
MIN_ENTRIES = 128  # that a rank sends to another, so that rounding up to words does not matter
NO_LIMIT = 2**40  # bytes
STEPS = {"topka": 1, "oktopk": 4}  # oktopk's thresholds need a few steps to settle


class TimedTransport(SimulatedTransport):
    """The transport of a simulated rank that records the bytes of every round."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        super().__init__(group, rank)
        self.rounds: list[int] = []

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        sent = sum(message.nbytes for message in outgoing.values())
        received = sum(message.nbytes for message in incoming.values())
        self.rounds.append(max(sent, received))
        super().exchange(outgoing, incoming)

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        self.rounds.append(0)  # headers: their bytes do not grow with the gradient
        super().all_to_all(x, out)


@dataclass(frozen=True, slots=True)
class Compressed:
    """A gradient, the fraction of it that is kept, and how entries travel."""

    numel: int
    density: float
    wire: CodecName = "bf16"

    def on(self, size: int) -> Work:
        """Its exchange between so many ranks."""
        return Work(self.numel, num_kept(self.numel, self.density), size, self.wire)


@dataclass(frozen=True, slots=True)
class ScaledStep:
    """A step of one method on P ranks."""

    method: str
    size: int
    bytes_sent: float
    """Bytes sent by a rank: the mean of the ranks."""

    seconds: float
    simulated: bool


def scaled(
    method: str, size: int, gradient: Compressed, link: Link, speed: KernelSpeed
) -> ScaledStep:
    """Return the cost of a step on `size` ranks: simulated, or by formula if there are too many."""
    work, density = gradient.on(size), gradient.density
    if size > MAX_SIMULATED.get(method, 0):
        cost = METHODS[method].cost(work)
        return ScaledStep(method, size, cost.sent, cost.seconds(link, speed), False)
    small = min(gradient.numel, max(2**16, round(MIN_ENTRIES * size / density)))
    factor = gradient.numel / small
    short_bytes = NO_LIMIT if is_short(work) else 0  # the smaller gradient goes the same way

    def main(comm: Comm) -> tuple[float, list[int]]:
        transport = comm.transport
        assert isinstance(transport, TimedTransport)
        options = {"method": method, "wire": gradient.wire, "short_bytes": short_bytes}
        reducer = Reducer(small, density=density, comm=comm, **options)
        variants = gradients([small], comm.rank, 2)
        for step in range(STEPS[method] - 1):
            reducer.reduce_(variants[step % 2].clone())
        before = len(transport.rounds)
        stats = reducer.reduce_(variants[STEPS[method] % 2])
        payload = stats.bytes_sent - stats.bytes_header
        return payload * factor + stats.bytes_header, transport.rounds[before:]

    ranks = simulate(size, main, transport=TimedTransport)
    slowest = [max(taken) for taken in zip_longest(*(rounds for _, rounds in ranks), fillvalue=0)]
    network = sum(link.latency + factor * taken / link.bandwidth for taken in slowest)
    mean = sum(sent for sent, _ in ranks) / size
    seconds = network + METHODS[method].cost(work).kernel_seconds(speed)
    return ScaledStep(method, size, mean, seconds, True)


def local(step: ScaledStep, name: str, every: int) -> ScaledStep:
    """An exchange as one of every few steps: what it costs for each of them."""
    return replace(
        step, method=name, bytes_sent=step.bytes_sent / every, seconds=step.seconds / every
    )


def sparseloco(size: int, gradient: Compressed, link: Link, speed: KernelSpeed) -> ScaledStep:
    """An exchange of SparseLoCo, by formula: its messages all have the size of their chunks.

    Its values always have 2 bits.
    """
    sent = 4.0 * num_words(gradient.numel, gradient.density) * (size - 1)
    work = gradient.on(size)
    kernels = work.numel * speed.per_element + work.kept * size * speed.per_entry
    seconds = link.latency + sent / link.bandwidth + kernels
    return ScaledStep("sparseloco", size, sent, seconds, False)


def rows_of(
    size: int, gradient: Compressed, link: Link, speed: KernelSpeed, every: int
) -> list[ScaledStep]:
    """All methods on `size` ranks. Local steps exchange every few steps, each rank its share.

    By formula, since simulated gradients have more in common than weight changes: the selections of
    ranks would overlap, and make the union of them look smaller than it is.
    """
    given = size, gradient, link, speed
    share = replace(gradient, density=gradient.density / size)
    each_step = {name: scaled(name, *given) for name in ("dense", *STEPS)}
    return [
        *each_step.values(),
        local(scaled(SHARED_METHOD, size, share, link, speed), "local_steps", every),
        local(sparseloco(*given), "sparseloco", every),
    ]


def show(
    most: int, gradient: Compressed, link: Link, speed: KernelSpeed, every: int
) -> list[ScaledStep]:
    """Print how bytes and time grow with the number of ranks."""
    sizes = [size for size in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if size < most]
    sys.stdout.write(
        f"{gradient.numel:,} gradients, density {gradient.density:g} as {gradient.wire}; "
        f"{1e3 * link.latency:.2f} ms latency, "
    )
    sys.stdout.write(f"{8e-6 * link.bandwidth:.0f} Mbit/s per worker; MB sent by a worker and ms ")
    sys.stdout.write(f"per step; local_steps and sparseloco exchange every {every}\n")
    names = ("dense", *STEPS, "local_steps", "sparseloco")
    sys.stdout.write(f"{'workers':>8}" + "".join(f"{name:>22}" for name in names) + "\n")
    rows = []
    for size in [*sizes, most]:
        row = rows_of(size, gradient, link, speed, every)
        cells = [
            f"{r.bytes_sent / 1e6:12.3f}{1e3 * r.seconds:8.1f} {'' if r.simulated else '*':1}"
            for r in row
        ]
        sys.stdout.write(f"{size:8}" + "".join(cells) + "\n")
        sys.stdout.flush()
        rows += row
    sys.stdout.write("* by formula\n")
    return rows


# The results of a bench for people: a table line by line, and a bar chart.


COLUMNS = (
    ("method", 16),
    ("ms/step", 9),
    ("middle half", 15),
    ("above noop", 11),
    ("to dense", 9),
    ("MB sent", 9),
    ("MB/step", 9),
    ("MB on wire", 11),
    ("bits/entry", 11),
)


def head() -> str:
    return " ".join(f"{title:>{width}}" for title, width in COLUMNS)


def line(row: Row) -> str:
    cells = (
        row.method,
        f"{row.ms_per_step:.0f}",
        f"{row.ms_low:.0f} - {row.ms_high:.0f}",
        "" if row.method == NOOP else f"{row.ms_above_noop:.0f}",
        "" if row.ratio_to_dense is None else f"{row.ratio_to_dense:.3f}",
        f"{row.bytes_sent / 1e6:.2f}",
        f"{row.bytes_sent / row.every / 1e6:.3f}",
        "" if row.bytes_on_interface is None else f"{row.bytes_on_interface / 1e6:.2f}",
        "" if row.bits_per_kept is None else f"{row.bits_per_kept:.1f}",
    )
    return " ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def plot(rows: list[Row], path: Path) -> None:
    """Draw milliseconds above the no-op on a logarithmic scale, a group of bars per rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = list(dict.fromkeys(row.rate for row in rows))
    names = list(dict.fromkeys(row.method for row in rows if row.method != NOOP))
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.2 * len(names) * len(rates)))
    height = 0.8 / len(rates)
    for i, rate in enumerate(rates):
        found = {row.method: row for row in rows if row.rate == rate}
        times = [max(found[name].ms_above_noop, 0.1) if name in found else 0 for name in names]
        places = [place + height * (i - (len(rates) - 1) / 2) for place in range(len(names))]
        label = "unshaped" if rate == "none" else rate
        bars = axes.barh(places, times, height=height * 0.92, label=label)
        axes.bar_label(
            bars, [f"{time:.0f}" if time else "" for time in times], fontsize=7, padding=2
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.08)
    shown = [row.ms_above_noop for row in rows if row.method != NOOP and row.ms_above_noop > 0]
    axes.set_xlim(left=10 ** math.floor(math.log10(min(shown, default=1))))
    first = rows[0]
    axes.set_title(
        f"{first.workers} workers, {first.numel:,} gradients, density {first.density:g}",
        fontsize=10,
    )
    axes.set_xlabel("milliseconds per step above a no-op exchange (less is better)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# A worker of the bench: it measures every case at every rate, in the same order on every rank.


def work(args: argparse.Namespace, rates: list[str], methods: list[str]) -> int:
    """Measure everything; rank 0 prints the table and writes the files."""
    comm = Comm(TorchTransport())
    say = sys.stdout.write if comm.rank == 0 else len
    if not network.inside() and rates != [network.UNSHAPED]:
        say("links cannot be shaped here: one rate, this network as it is\n")
        rates = [network.UNSHAPED]
    stream = Stream(shapes_of(args.model), comm.rank)
    say(f"{comm.size} workers, {stream.numel:,} gradients in {len(stream.shapes)} tensors, ")
    say(f"density {args.density:g}; {os.cpu_count()} cores, {platform.machine()}, ")
    say(f"torch {torch.__version__}\n")
    rows: list[Row] = []
    progress = TimeLeft("rows", len(rates) * len(methods), in_pipes=False)
    for rate in rates:
        if network.inside() and comm.rank == 0:
            network.shape(comm.size, rate)
        say(f"\n{'unshaped' if rate == network.UNSHAPED else rate}\n{head()}\n")
        for name in methods:
            rows.append(compared(_measured(name, rate, stream, args, comm), rows))
            progress.clear()
            say(line(rows[-1]) + "\n")
            sys.stdout.flush()
            progress(len(rows))
        progress.clear()
        if comm.rank == 0:  # so that an interrupted bench keeps the rates it has finished
            _write(rows, args)
    return 0


def _write(rows: list[Row], args: argparse.Namespace) -> None:
    """Write the files that were asked for."""
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    if args.plot is not None and rows:
        plot(rows, args.plot)


def _measured(name: str, rate: str, stream: Stream, args: argparse.Namespace, comm: Comm) -> Row:
    return measure(
        name,
        stream,
        comm,
        rate=rate,
        seconds=args.seconds,
        settings=BenchSettings(args.density, args.wire, comm.size),
        every=args.every,
        counter=_counter(comm.size),
    )


def predict(args: argparse.Namespace, rates: list[str], _: list[str]) -> int:
    """Measure network and kernels here; then print advice, or measure simulated workers."""
    comm, cpu = Comm(TorchTransport()), torch.device("cpu")
    numel = sum(math.prod(shape) for shape in shapes_of(args.model))
    link, speed = probe_link(comm, cpu), probe_kernels(comm, cpu)
    if args.advise:
        advise(numel, args.density, args.step_ms, rates, comm, speed, link, args.wire)
        return 0
    names = [NOOP, DENSE, *STEPS]
    stream, rows = Stream(shapes_of(args.model), comm.rank), []
    for name in names:
        row = _measured(name, network.UNSHAPED, stream, args, comm)
        rows.append(compared(row, rows))
    if comm.rank == 0:
        gradient = Compressed(numel, args.density, args.wire)
        shown = show(args.simulate, gradient, link, speed, args.every)
        known = {told.method: told for told in shown if told.size == comm.size}
        found = {row.method.removeprefix("ddp_"): row for row in rows}
        sys.stdout.write(f"measured here with {comm.size} workers, against the clock:")
        for name in ("dense", *STEPS):
            told = known.get(name) or scaled(name, comm.size, gradient, link, speed)
            took = f"{found[name].ms_above_noop:.0f} ms ({1e3 * told.seconds:.0f})"
            sent = f"{found[name].bytes_sent / 1e6:.2f} MB ({told.bytes_sent / 1e6:.2f})"
            sys.stdout.write(f"\n{name:>8} {took}, {sent}")
        sys.stdout.write("\n")
    return 0


def _counter(size: int) -> Callable[[], int | None]:
    """Return a function that reads how many bytes this worker sent, by the kernel's counter.

    On loopback it is the mean of all workers.
    """
    if network.inside():
        return lambda: network.bytes_sent(network.DEVICE)
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
        return lambda: network.bytes_sent("lo") // size
    return lambda: None
