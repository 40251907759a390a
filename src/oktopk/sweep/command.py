# SPDX-License-Identifier: Apache-2.0
"""`oktopk sweep`: search for the best settings of `oktopk train` within a budget."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from oktopk.compare.plan import refuse_comparison, refuse_run
from oktopk.runlog.run_directory import lock
from oktopk.sweep.loop import sweep
from oktopk.sweep.plan import Plan, store_or_compare
from oktopk.sweep.space import SEARCHED, add_ranges, parse
from oktopk.train.config import Config
from oktopk.train.flags import add_config_flag, load_with_flags
from oktopk.train.flags import add_flags as add_train_flags
from oktopk.train.preflight import check_before_start
from oktopk.train.run_process import exit_code_of
from oktopk.train.tasks.registry import find_metric
from oktopk.utils.signals import raise_on_signals

NAME = "sweep"
TRIALS = 20
MOST = 1e6
"""The largest budget, in trials or minutes; a million minutes are two years."""


def add_flags(parser: argparse.ArgumentParser, config: Config) -> None:
    """The flags of `oktopk sweep`, and those of `oktopk train`, some of them as ranges."""
    parser.add_argument(
        "--trials", type=int, help=f"of the sweep, earlier calls included ({TRIALS})"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="of this call; the next call continues a trial that was interrupted",
    )
    parser.add_argument("--metric", help="what to optimize (default: the task's first)")
    parser.add_argument(
        "--no-prune", action="store_true", help="do not end unpromising trials early"
    )
    add_config_flag(parser)
    add_ranges(parser)
    add_train_flags(parser, config, without=("name", "keep", *SEARCHED))
    parser.add_argument("--name", default=NAME, help="folder in RUNS, with a folder for each trial")
    parser.add_argument("--keep", type=int, default=1, help="checkpoints of a trial (%(default)s)")


def command(args: argparse.Namespace) -> int:
    """Start or continue the sweep until its budget is spent."""

    def act() -> int:
        plan = resolve(args)
        number, deadline = budget(args)
        refuse_run(plan.folder)
        refuse_comparison(plan.folder)
        plan.folder.mkdir(parents=True, exist_ok=True)
        with lock(plan.folder), raise_on_signals():
            store_or_compare(plan)
            return sweep(plan, number, deadline, prune=not args.no_prune)

    return exit_code_of("oktopk sweep", act)


def resolve(args: argparse.Namespace) -> Plan:
    """The ranges to search, and the config for everything else."""
    given = {name: getattr(args, name) for name in SEARCHED}
    rest = argparse.Namespace(**{k: v for k, v in vars(args).items() if k not in SEARCHED})
    base, space = parse(load_with_flags(rest), given)
    check_before_start("oktopk sweep", base)
    runs = str(Path(base.runs) / base.name)
    metric = find_metric(base.task, args.metric)
    return Plan(args.config or "", replace(base, runs=runs), space, metric)


def budget(args: argparse.Namespace) -> tuple[int, float]:
    """The number of trials and the time at which the sweep ends."""
    for name in ("trials", "minutes"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name} must be above 0, got {value:g}")
        if value is not None and value > MOST:
            raise ValueError(f"--{name} must be at most {MOST:g}, got {value:g}")
    number = args.trials or (sys.maxsize if args.minutes else TRIALS)
    return number, time.monotonic() + 60 * (args.minutes or float("inf"))
