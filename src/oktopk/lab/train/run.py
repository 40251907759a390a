# SPDX-License-Identifier: Apache-2.0
"""`oktopk train`: from the command line to a run on one rank, and its summary."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from oktopk.comm.communicator import Comm
from oktopk.errors import RunError
from oktopk.lab.baselines import BASELINE_NAMES
from oktopk.lab.runlog.reader import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    create_run_directory,
    has_checkpoint,
    latest_number,
    latest_resumable,
    lock,
    run_directory,
)
from oktopk.lab.runlog.schema import PhaseTotals
from oktopk.lab.runlog.writer import RunTotals, sum_over_ranks
from oktopk.lab.tasks.registry import task_type
from oktopk.lab.train import checkpoint
from oktopk.lab.train.checkpoint import restore_run as restore
from oktopk.lab.train.config import LOCAL_STEPS, Config
from oktopk.lab.train.config_files import given, load_run, load_with_flags, to_toml, with_flags
from oktopk.lab.train.console import LineHandler, WarningCollector, print_line
from oktopk.lab.train.loop import train
from oktopk.lab.train.recorder import Recorder, StopRequest
from oktopk.lab.train.setup import (
    Run,
    Target,
    check_before_start,
    parse_target,
    prepare_data,
    prepare_kernels,
    set_up,
)
from oktopk.lab.train.validate import Validation, all_or_raise, shared_settings
from oktopk.launch import network
from oktopk.launch.ranks import LOCAL_LAUNCHER, SINGLE_RANK, RankEnvironment, read_rank_environment
from oktopk.launch.rendezvous import job_comm, job_process_group
from oktopk.launch.workers import num_workers_to_start, run_local_workers
from oktopk.utils.arguments import format_bytes, format_duration, format_metric
from oktopk.utils.files import FileError, write_atomically

# The summary that `oktopk train` prints when a run has finished.


def summary(
    config: Config,
    result: Validation | None,
    totals: RunTotals,
    seconds: float,
    directory: Path,
    workers: int,
) -> str:
    """Metrics, bytes by phase compared with dense, the time, and where the files are."""
    lines = [f"finished in {format_duration(seconds)}"]
    if result is not None:
        task = task_type(config.task)
        shown = (
            f"{m.label} {format_metric(result.metrics[m.name])}" for m in task.metrics if m.shown
        )
        lines.append(f"{', '.join(shown)} on {result.examples} {task.unit}")
        if config.until:
            lines.append(_target_line(parse_target(config.until, task.metrics), result, totals))
    lines.append(f"{'':12} {'steps':>6} {'ms/step':>8} {'sent':>10} {'as dense':>10} {'ratio':>7}")
    phases = {phase: sums for phase, sums in totals.items() if sums.steps}
    if len(phases) > 1:
        lines += [_row(f"{phase} phase", sums) for phase, sums in phases.items()]
    lines.append(_row("whole run", totals.whole))
    of = f"all {workers} workers" if workers > 1 else "the one worker"
    lines.append(f"bytes are those of {of}, headers included")
    if totals.whole.skipped:
        lines.append(f"{totals.whole.skipped} steps were skipped: a gradient was not finite")
    lines.append(f"run folder: {directory} (metrics, TensorBoard events, checkpoints, config)")
    lines.append(f"to look at it: {directory / 'report.html'}")
    return "\n".join(lines)


def _target_line(target: Target, result: Validation, totals: RunTotals) -> str:
    reached = "reached" if target.is_reached(result.metrics) else "not reached"
    whole = totals.whole
    took = format_duration(whole.microseconds / 1e6)
    return f"{target} was {reached} after {whole.steps} steps, {took} of training"


def _row(name: str, sums: PhaseTotals) -> str:
    each = f"{sums.microseconds / sums.steps / 1e3:.0f}" if sums.steps else "-"
    ratio = f"{sums.bytes_dense / sums.bytes_sent:.1f}x" if sums.bytes_sent else "-"
    sent, dense = format_bytes(sums.bytes_sent), format_bytes(sums.bytes_dense)
    return f"{name:12} {sums.steps:6} {each:>8} {sent:>10} {dense:>10} {ratio:>7}"


# One training run on one rank, from the process group to the report.


log = logging.getLogger("oktopk")
RESUME_ADVICE = "the same command with --resume continues from the last checkpoint"
ReportWriter = Callable[[Path], object]
"""Writes a report into a run directory."""


def run_worker(
    config: Config,
    env: RankEnvironment,
    resume: bool,
    given: Collection[str],
    write_report: ReportWriter | None = None,
) -> int:
    """Join the process group, train, and print a summary on rank 0. Returns the exit code."""
    logging.basicConfig(
        level=logging.INFO if env.rank == 0 else logging.WARNING,
        format="%(message)s",
        handlers=[LineHandler()],
    )
    started = time.monotonic()
    with job_process_group(env, config.timeout, shared_settings(config, resume)) as device:
        directory, result, totals = run_training(config, device, env, resume, given, write_report)
    if env.rank == 0:
        took = time.monotonic() - started
        print_line(summary(config, result, totals, took, directory, env.world_size))
    return 0


def run_training(
    config: Config,
    device: torch.device,
    env: RankEnvironment,
    resume: bool,
    given: Collection[str] = (),
    write_report: ReportWriter | None = None,
) -> tuple[Path, Validation | None, RunTotals]:
    """Train in a run directory. On resume only the settings in `given` may have changed."""
    comm, started = job_comm(config.timeout), time.monotonic()
    with WarningCollector() as warnings:
        run = set_up(config, comm, device, env)  # first: a failure here leaves no directory
        try:
            with (
                open_run_directory(config, comm, device, resume) as directory,
                report_at_end(directory, write_report if comm.rank == 0 else None),
            ):
                metrics_bytes = find_and_restore(run, directory, given) if resume else 0
                # only now: a resume that fails must leave the settings as they are
                all_or_raise(
                    comm, device, f"writing {CONFIG_FILE}", lambda: write_config(run, directory)
                )
                return directory, *run_recorded(directory, run, metrics_bytes, warnings, started)
        finally:
            run.exchange.close()


def write_config(run: Run, directory: Path) -> None:
    """Write the settings of the run, on rank 0."""
    if run.comm.rank == 0:
        write_atomically(directory / CONFIG_FILE, to_toml(run.config))


def run_recorded(
    directory: Path, run: Run, metrics_bytes: int, warnings: WarningCollector, started: float
) -> tuple[Validation | None, RunTotals]:
    """Train with metrics and stop signals, from the first step to the last validation."""
    stop = StopRequest()
    try:
        with Recorder(run, directory, metrics_bytes, warnings, stop) as recorder, stop:
            recorder.print(start_message(run, directory))
            result = train(run, recorder, stop, directory)
            totals = sum_over_ranks(run.totals, run.comm, run.device)
            recorder.end(totals, time.monotonic() - started)
        return result, totals
    except RuntimeError as error:
        if run.exchange.failure is None:
            raise
        # DDP wraps the failure of the exchange in a message of its own
        advice = f"; {RESUME_ADVICE}" if has_checkpoint(directory) else ""
        raise RunError(f"{run.exchange.failure}{advice}") from error


@contextmanager
def open_run_directory(
    config: Config, comm: Comm, device: torch.device, resume: bool
) -> Iterator[Path]:
    """The directory of the run, the same on every rank. Rank 0 chooses its number and locks it."""
    runs = Path(config.runs)
    chosen = all_or_raise(
        comm,
        device,
        f"making a folder in {runs}",
        lambda: create_run_directory(runs, config.name, resume) if comm.rank == 0 else 0,
    )
    number = comm.all_gather_size(chosen, device, stage="run")[0]
    directory = run_directory(runs, config.name, number)

    def enter() -> AbstractContextManager[object]:
        directory.mkdir(parents=True, exist_ok=True)  # on machines that do not share it
        return lock(directory) if comm.rank == 0 else nullcontext()

    with all_or_raise(comm, device, f"using the folder {directory}", enter):
        yield directory


@contextmanager
def report_at_end(directory: Path, write_report: ReportWriter | None) -> Iterator[None]:
    """Write the report when the run ends, for any reason. Its errors do not fail the run."""
    try:
        yield
    finally:
        if write_report is not None:
            try:
                write_report(directory)
            except OSError as error:
                log.warning("no report was written: %s", error)
            except Exception:  # it must not replace the error that ended the run
                log.exception("no report was written; `oktopk report %s` tries again", directory)


def find_and_restore(run: Run, directory: Path, given: Collection[str]) -> int:
    """Restore the latest intact checkpoint. Returns the bytes of the metrics that belong to it."""
    path = checkpoint.find(directory / CHECKPOINT_FOLDER, run.comm, run.device)
    if path is None:
        if (directory / METRICS_FILE).exists():
            log.info("%s was begun before and has no checkpoint: starting again", directory)
        return 0
    runs, name = directory.parent, run.config.name
    last = run_directory(runs, name, latest_number(runs, name))
    if last != directory:
        log.info("%s is newer, but has no checkpoint", last)
    metrics_bytes = all_or_raise(
        run.comm, run.device, f"loading {path}", lambda: restore(run, path, given)
    )
    log.info("resuming from %s", path)
    return metrics_bytes


def start_message(run: Run, directory: Path) -> str:
    """What is about to be trained, in two lines."""
    config, model = run.config, run.model
    numel = sum(parameter.numel() for parameter in model.parameters())
    until = f", until {run.target}" if run.target else ""
    return (
        f"{directory}: {type(model).__name__} with {numel:,} parameters, {run.task.describe()}\n"
        f"{run.comm.size} worker{'s' * (run.comm.size > 1)} x batch {config.batch} on "
        f"{run.device.type}: "
        f"{run.steps_per_epoch} steps an epoch, {run.total_steps} in all, {_phases(run)}{until}"
    )


def _phases(run: Run) -> str:
    config, settings = run.config, run.exchange.settings
    method, dense = settings["method"], min(run.warmup_steps, run.total_steps)
    if method in BASELINE_NAMES:
        return f"{dense} of them dense, then {method}" if dense else f"exchanged by {method}"
    if method == LOCAL_STEPS:
        return f"{method} exchanged every {config.every} at density {config.density}"
    if method == "dense" or dense == run.total_steps:
        return "all of them dense"
    falling = sum(steps for steps, _ in settings["schedule"])
    ramp = f"{falling} from 25 % down, " if falling else ""
    first = f"{dense} of them dense, " if dense else ""
    then = "then " if first or ramp else ""
    return f"{first}{ramp}{then}{method} at density {config.density}"


# `oktopk train`: resolve the config, then start local workers or be one of the ranks.


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
