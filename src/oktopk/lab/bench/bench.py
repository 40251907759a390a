# SPDX-License-Identifier: Apache-2.0
"""`oktopk bench`: its flags, and predicted times of every method from a short measurement."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import get_args

from oktopk.comm.communicator import Comm
from oktopk.lab.bench.measure import CASES, DENSE, MODELS, NOOP, shapes_of
from oktopk.launch import network
from oktopk.launch.network import UNSHAPED
from oktopk.launch.ranks import read_rank_environment
from oktopk.launch.rendezvous import job_process_group
from oktopk.launch.workers import num_workers_to_start, run_local_workers
from oktopk.methods import METHODS, break_even
from oktopk.methods.base import KernelSpeed, Link, Work
from oktopk.settings import DENSITY, LOCAL_EVERY, WIRE, num_kept
from oktopk.utils.arguments import (
    MOST_SECONDS,
    MOST_WORKERS,
    UsageError,
    did_you_mean,
    number_in_range,
)
from oktopk.utils.extras import require
from oktopk.wire import CodecName

# `oktopk bench`: its flags, and how the workers are started.


WORKERS = 8
RATES = "none,1gbit,200mbit"
MOST_SIMULATED = 4096
MOST_EVERY = 10**6
MOST_NUMEL = 2**31 - 1
"""Positions of gradient entries are sent as 32-bit integers."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `oktopk bench`, in groups."""
    _add_what(parser.add_argument_group("what is measured"))
    _add_network(parser.add_argument_group("workers and network"))
    how = parser.add_argument_group("results")
    how.add_argument("--json", type=Path, metavar="FILE", help="write the rows for programs")
    how.add_argument("--plot", type=Path, metavar="FILE", help="write a bar chart as PNG")
    _add_predictions(parser.add_argument_group("predictions, from a short measurement"))


def _add_what(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--model", default="lstman4", help=f"{', '.join(MODELS)} or a number of gradients (lstman4)"
    )
    group.add_argument("--model-size", metavar="N", help="gradients, instead of --model")
    group.add_argument(
        "--methods",
        default=",".join(CASES),
        help="with commas between them; noop and ddp_dense are always measured (%(default)s)",
    )
    group.add_argument(
        "--density", type=float, default=DENSITY, metavar="X", help="fraction kept (%(default)s)"
    )
    group.add_argument(
        "--every",
        type=number_in_range(int, 1, MOST_EVERY),
        default=LOCAL_EVERY,
        metavar="STEPS",
        help="steps for each exchange of local_steps, diloco and sparseloco (%(default)s)",
    )
    group.add_argument(
        "--wire",
        default=WIRE,
        metavar="WIRE",
        choices=get_args(CodecName),
        help=f"how entries travel: {', '.join(get_args(CodecName))} (%(default)s)",
    )
    group.add_argument(
        "--seconds",
        type=number_in_range(float, 0.001, MOST_SECONDS),
        default=4.0,
        metavar="X",
        help="of steps per row (%(default)g)",
    )


def _add_network(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--workers",
        type=number_in_range(int, 1, MOST_WORKERS),
        metavar="N",
        help=f"processes to start, without a launcher ({WORKERS})",
    )
    group.add_argument(
        "--rates", default=RATES, help="of every link, for `tc`; none: unshaped (%(default)s)"
    )
    group.add_argument("--loopback", action="store_true", help="no namespaces, no shaping")
    group.add_argument(
        "--timeout",
        type=number_in_range(float, 0.1, MOST_SECONDS),
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for a rank (%(default)g)",
    )


def _add_predictions(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--advise", action="store_true", help="say which method would be fastest at which rate"
    )
    group.add_argument(
        "--step-ms",
        type=number_in_range(float, 0.0, 1e9),
        default=0.0,
        metavar="T",
        help="--advise: milliseconds of computing in a step (0)",
    )
    group.add_argument(
        "--simulate", type=int, metavar="P", help="the methods on up to P simulated workers"
    )


def command(args: argparse.Namespace, argv: list[str]) -> int:
    """Start the workers, or be one of them; return the exit code."""
    # argparse gives a list for a lone `--` as a value
    rates, methods = str(args.rates).split(","), _with_baselines(str(args.methods).split(","))
    _check(args, rates)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo between processors, on every machine alike
    env = read_rank_environment()
    number = num_workers_to_start(env, args.workers, WORKERS)
    if not number:
        from oktopk.lab.bench.worker import predict, work

        may_differ = ("run", "workers", "json", "plot")
        settings = {name: value for name, value in vars(args).items() if name not in may_differ}
        with job_process_group(env, args.timeout, settings):
            return (predict if args.advise or args.simulate else work)(args, rates, methods)
    if args.loopback:
        return run_local_workers(number, argv)
    return network.run_workers_in_network(number, argv, network.UNSHAPED)


def _check(args: argparse.Namespace, rates: list[str]) -> None:
    try:
        for rate in rates:
            network.check_rate(rate)
        args.model = args.model_size or args.model
        _check_sizes(args)
        for path in (args.json, args.plot):
            if path is not None and path.is_dir():
                raise ValueError(f"{path} is a folder: name a file")
        if args.plot is not None:
            require("oktopk bench --plot", "matplotlib")
        if (args.advise or args.simulate) and (args.json or args.plot):
            raise ValueError("--json and --plot are for measurements, not --advise or --simulate")
        if not 0 < args.density <= 1:
            raise ValueError(f"--density must be in (0, 1], got {args.density}")
    except ValueError as error:
        raise UsageError(str(error)) from None


def _check_sizes(args: argparse.Namespace) -> None:
    if args.simulate is not None and args.simulate < 2:
        raise ValueError(f"--simulate needs 2 workers or more, got {args.simulate}")
    if args.simulate is not None and args.simulate > MOST_SIMULATED:
        raise ValueError(f"--simulate takes at most {MOST_SIMULATED}, got {args.simulate}")
    if sum(math.prod(shape) for shape in shapes_of(args.model)) > MOST_NUMEL:
        raise ValueError(f"--model {args.model} has more than {MOST_NUMEL:,} gradients")


def _with_baselines(methods: list[str]) -> list[str]:
    """Return the methods in the order of the table, with those that they are compared with."""
    unknown = [name for name in methods if name not in CASES]
    if unknown:
        hint = did_you_mean(unknown[0], CASES) or f": it is one of {', '.join(CASES)}"
        raise UsageError(f"--methods: there is no {unknown[0]!r}{hint}")
    return [name for name in CASES if name in {NOOP, DENSE, *methods}]


# `oktopk bench --advise`: predicted times of every method, from a short measurement.


UNITS = {"tbit": 1e12, "gbit": 1e9, "mbit": 1e6, "kbit": 1e3, "bit": 1.0}


def bits_per_second(rate: str) -> float:
    """Return 2e8 for `"200mbit"`, and so on for all units of `tc`."""
    unit = next(unit for unit in UNITS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * UNITS[unit]


def advise(
    numel: int, density: float, step_ms: float, rates: list[str], comm: Comm, speed: KernelSpeed,
    link: Link, codec: CodecName,
) -> None:  # fmt: skip
    """Print the table of predicted times; `link` is this network as measured."""
    say = sys.stdout.write if comm.rank == 0 else len
    work = Work(numel, num_kept(numel, density), comm.size, codec)
    links = {
        f"{rate}": Link(link.latency, min(bits_per_second(rate) / 8, link.bandwidth))
        for rate in rates
        if rate != UNSHAPED
    }
    links["here"] = link
    say(f"{comm.size} workers, {numel:,} gradients, density {density:g}, ")
    say(f"{step_ms:g} ms of compute\n")
    say(f"measured here: {1e3 * link.latency:.2f} ms latency, ")
    say(f"{8e-6 * link.bandwidth:.0f} Mbit/s sent per worker while all send, kernels ")
    say(f"{1e9 * speed.per_element:.2f} ns per element, ")
    say(f"{1e9 * speed.per_entry:.1f} per entry\n\n")
    say("predicted milliseconds per step, nothing overlapped\n")
    say(f"{'method':10}" + "".join(f"{name:>10}" for name in links) + "   faster than dense\n")
    for name, method in METHODS.items():
        cost = method.cost(work)
        times = [step_ms + 1e3 * cost.seconds(its, speed) for its in links.values()]
        edge = break_even(name, work, link.latency, speed)
        say(f"{name:10}" + "".join(f"{time:10.0f}" for time in times))
        say(f"   {'' if name == 'dense' else _below(edge)}\n")


def _below(bytes_per_second: float) -> str:
    if bytes_per_second == math.inf:
        return "always"
    if bytes_per_second == 0:
        return "never"
    return f"below {8e-6 * bytes_per_second:,.0f} Mbit/s per worker"
