"""`oktopk bench`: its flags, and how the workers are started."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import get_args

from oktopk.bench.baselines import CASES, DENSE, NOOP
from oktopk.bench.shapes import MODELS, shapes_of
from oktopk.errors import LaunchError
from oktopk.launch import network
from oktopk.launch.local_workers import num_workers_to_start, run_local_workers
from oktopk.launch.process_group import job_process_group
from oktopk.launch.rank_environment import read_rank_environment
from oktopk.utils.extras import require
from oktopk.utils.flags import MOST_SECONDS, MOST_WORKERS, number_in_range
from oktopk.wire.codec import CodecName

WORKERS = 8
RATES = "none,1gbit,200mbit"
MOST_SIMULATED = 4096
MOST_EVERY = 10**6
MOST_NUMEL = 2**31 - 1
"""Positions of gradient entries are sent as 32-bit integers."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `oktopk bench`."""
    parser.add_argument(
        "--workers", type=number_in_range(int, 1, MOST_WORKERS), help=f"default: {WORKERS}"
    )
    parser.add_argument(
        "--rates", default=RATES, help="of every link, for `tc`; none: unshaped (%(default)s)"
    )
    parser.add_argument(
        "--model", default="lstman4", help=f"{', '.join(MODELS)} or a number of gradients"
    )
    parser.add_argument("--density", type=float, default=0.02, help="default: %(default)s")
    parser.add_argument(
        "--methods", default=",".join(CASES), help="comma-separated; default: %(default)s"
    )
    parser.add_argument(
        "--every",
        type=number_in_range(int, 1, MOST_EVERY),
        default=32,
        help="steps for each exchange of local_steps, diloco and sparseloco (%(default)s)",
    )
    parser.add_argument(
        "--wire",
        default="bf16",
        choices=get_args(CodecName),
        help="how entries travel (%(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=number_in_range(float, 0.001, MOST_SECONDS),
        default=4.0,
        help="of steps per row (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows for programs")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a bar chart as PNG")
    parser.add_argument(
        "--advise", action="store_true", help="predict, from a short measurement, instead"
    )
    parser.add_argument("--model-size", metavar="N", help="gradients, instead of --model")
    parser.add_argument(
        "--step-ms",
        type=number_in_range(float, 0.0, 1e9),
        default=0.0,
        metavar="T",
        help="--advise: compute of a step (0)",
    )
    parser.add_argument(
        "--simulate", type=int, metavar="P", help="the methods on up to P simulated workers instead"
    )
    parser.add_argument("--loopback", action="store_true", help="no namespaces, no shaping")
    parser.add_argument(
        "--timeout",
        type=number_in_range(float, 0.1, MOST_SECONDS),
        default=300.0,
        help="seconds to wait for a rank",
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
        from oktopk.bench.worker import predict, work

        may_differ = ("run", "known", "workers", "json", "plot")
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
        raise LaunchError(str(error)) from None


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
        raise LaunchError(f"unknown method {unknown[0]!r}; known: {', '.join(CASES)}")
    return [name for name in CASES if name in {NOOP, DENSE, *methods}]
