# SPDX-License-Identifier: Apache-2.0
"""`oktopk train`: resolve the config, then start local workers or be one of the ranks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from oktopk.errors import RunError
from oktopk.launch import network
from oktopk.launch.local_workers import num_workers_to_start, run_local_workers
from oktopk.launch.rank_environment import (
    LOCAL_LAUNCHER,
    SINGLE_RANK,
    read_rank_environment,
)
from oktopk.runlog.run_directory import (
    CONFIG_FILE,
    latest_number,
    latest_resumable,
    run_directory,
)
from oktopk.train.config import Config
from oktopk.train.config_files import load_run
from oktopk.train.console import print_line
from oktopk.train.flags import given, load_with_flags, with_flags
from oktopk.train.preflight import check_before_start, prepare_data, prepare_kernels
from oktopk.train.run import RESUME_ADVICE, ReportWriter, run_worker
from oktopk.utils.files import FileError

EXPECTED_EXIT_CODES = (2, 130, 143)
"""Wrong arguments, SIGINT and SIGTERM: the user knows why the run ended."""


def command(args: argparse.Namespace, argv: list[str], write_report: ReportWriter) -> int:
    """Start the workers; a process that a launcher or this command started is a rank itself."""
    try:
        config = resolve(args)
    except ValueError as error:
        sys.stderr.write(f"oktopk train: {error}\n")
        return 2
    env = read_rank_environment()
    if config.network and env is not None and env.launcher != LOCAL_LAUNCHER and env.world_size > 1:
        sys.stderr.write(
            f"oktopk train: --network {config.network} is for workers on one machine that this "
            f"command starts, and this is {env}: leave it out\n"
        )
        return 2
    workers = num_workers_to_start(env, getattr(args, "workers", None), config.workers)
    try:
        if workers or env is None:  # ranks of a launcher must not fail one by one
            check_before_start("oktopk train", config)
        if config.network and not workers and env is None:
            sys.stderr.write(f"one worker needs no network: --network {config.network} is unused\n")
        if workers:
            if not network.inside():  # the process outside has done it
                prepare_data(config)
                prepare_kernels()
            return run_workers(workers, argv, config, args.resume)
        if env is None:
            prepare_kernels()
        by_flag = given(args, config.task)
        return run_worker(config, env or SINGLE_RANK, args.resume, by_flag, write_report)
    except (RunError, FileError, OSError) as error:
        sys.stderr.write(f"oktopk train: {error}\n")
        return 1
    except ValueError as error:
        sys.stderr.write(f"oktopk train: {error}\n")
        return 2


def resolve(args: argparse.Namespace) -> Config:
    """The config with the flags applied. A resumed run keeps its own settings, except for flags.

    So the same command with --resume both starts a run and continues it.
    """
    config = load_with_flags(args)
    if args.resume:
        runs = Path(config.runs)
        number = latest_resumable(runs, config.name) or latest_number(runs, config.name)
        own = run_directory(runs, config.name, number) / CONFIG_FILE
        if own.exists():
            stored = load_run(own)
            if stored.task != config.task:
                raise ValueError(
                    f"{own.parent} is a run of the task {stored.task}: add --task {stored.task}, "
                    "or give another --name"
                )
            return with_flags(stored, args)
    return config


def run_workers(workers: int, argv: list[str], config: Config, resume: bool) -> int:
    """Start local workers and wait for them. Advise --resume if the failed run can be resumed."""
    if not network.inside():
        print_line(f"starting {workers} workers")
    runs = Path(config.runs)
    before = latest_number(runs, config.name)
    if config.network:
        code = network.run_workers_in_network(workers, argv, config.network)
    else:
        code = run_local_workers(workers, argv)
    failed = code and code not in EXPECTED_EXIT_CODES
    if failed and not resume and latest_resumable(runs, config.name) > before:
        sys.stderr.write(f"oktopk train: {RESUME_ADVICE}\n")
    return code
