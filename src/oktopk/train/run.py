# SPDX-License-Identifier: Apache-2.0
"""One training run on one rank, from the process group to the report."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from oktopk.baselines.names import BASELINE_NAMES
from oktopk.comm.communicator import Comm
from oktopk.errors import RunError
from oktopk.launch.process_group import job_comm, job_process_group
from oktopk.launch.rank_environment import RankEnvironment
from oktopk.runlog.aggregates import RunTotals, sum_over_ranks
from oktopk.runlog.run_directory import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    create_run_directory,
    has_checkpoint,
    latest_number,
    lock,
    run_directory,
)
from oktopk.train import checkpoint
from oktopk.train.all_or_raise import all_or_raise, shared_settings
from oktopk.train.config import LOCAL_STEPS, Config
from oktopk.train.config_files import to_toml
from oktopk.train.console import LineHandler, print_line
from oktopk.train.loop import train
from oktopk.train.recorder import Recorder
from oktopk.train.resume import restore
from oktopk.train.setup import Run, set_up
from oktopk.train.stop import StopRequest
from oktopk.train.summary import summary
from oktopk.train.validate import Validation
from oktopk.train.warning_collector import WarningCollector
from oktopk.utils.files import write_atomically

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
