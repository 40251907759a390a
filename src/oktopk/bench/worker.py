"""A worker of the bench: every contender at every rate, the same way on every rank."""

from __future__ import annotations

import argparse
import os
import platform
import sys

import torch

from oktopk.bench import network
from oktopk.bench.command import write
from oktopk.bench.measure import Row, compared, measure
from oktopk.bench.shapes import shapes_of
from oktopk.bench.stream import Stream
from oktopk.bench.table import head, line
from oktopk.comm import Comm, TorchTransport


def work(args: argparse.Namespace, rates: list[str], methods: list[str]) -> int:
    """Measure everything; rank 0 tells and writes."""
    comm = Comm(TorchTransport())
    say = sys.stdout.write if comm.rank == 0 else len
    rates = rates if network.inside() else [network.UNSHAPED]
    shapes = shapes_of(args.model)
    stream = Stream(shapes, comm.rank)
    say(f"{comm.size} workers, {stream.numel:,} gradients in {len(shapes)} tensors, ")
    say(f"density {args.density:g}; {os.cpu_count()} cores, {platform.machine()}, ")
    say(f"torch {torch.__version__}\n")
    rows: list[Row] = []
    for rate in rates:
        if network.inside() and comm.rank == 0:
            network.shape(comm.size, rate)
        say(f"\n{'unshaped' if rate == network.UNSHAPED else rate}\n{head()}\n")
        for name in methods:
            row = measure(
                name,
                stream,
                shapes,
                comm,
                rate=rate,
                seconds=args.seconds,
                settings={"density": args.density},
                counter=_counter(comm.size),
            )
            rows.append(compared(row, rows))
            say(line(rows[-1]) + "\n")
            sys.stdout.flush()
    if comm.rank == 0:
        write(rows, args)
    return 0


def _counter(size: int):  # noqa: ANN202
    """Bytes that left this worker, as the kernel counts; on loopback the mean of all workers."""
    if network.inside():
        return lambda: network.bytes_sent(network.DEVICE)
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
        return lambda: network.bytes_sent("lo") // size
    return lambda: None
