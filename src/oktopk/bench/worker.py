# SPDX-License-Identifier: Apache-2.0
"""A worker of the bench: it measures every case at every rate, in the same order on every rank."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable

import torch

from oktopk.bench.advise import advise
from oktopk.bench.baselines import DENSE, NOOP, BenchSettings
from oktopk.bench.measure import Row, compared, measure
from oktopk.bench.scale import STEPS, Compressed, scaled, show
from oktopk.bench.shapes import shapes_of
from oktopk.bench.stream import Stream
from oktopk.bench.table import head, line, plot
from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import TorchTransport
from oktopk.launch import network
from oktopk.methods.prediction import probe_kernels, probe_link
from oktopk.utils.progress import TimeLeft


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
