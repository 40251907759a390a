"""`oktopk train`: find the place among the workers, make or resume the run, sum it up."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from oktopk.comm.communicator import Comm
from oktopk.errors import RunError
from oktopk.launch.local_workers import (
    Place,
    find_place,
    joined,
    start_workers,
    workers_to_start,
)
from oktopk.launch.process_group import ALONE, comm_of_job
from oktopk.report.command import report
from oktopk.runlog.reader import CHECKPOINTS, SETTINGS, has_checkpoint
from oktopk.runlog.run_directory import (
    check_writable,
    lock,
    make,
    newest,
    numbered,
    resumable,
)
from oktopk.runlog.totals import Totals
from oktopk.train import checkpoint
from oktopk.train.all_or_raise import alike, together
from oktopk.train.config import (
    DEFAULT,
    Config,
    given,
    load,
    load_run,
    to_toml,
    with_flags,
)
from oktopk.train.console import LineHandler, say
from oktopk.train.data.manifest import find_manifests
from oktopk.train.loop import train
from oktopk.train.recorder import Recorder, Warnings
from oktopk.train.resume import restore
from oktopk.train.setup import Run, set_up, spoken_folder
from oktopk.train.summary import summary
from oktopk.train.validate import Validation
from oktopk.utils.extras import require
from oktopk.utils.files import FileError, write_whole

log = logging.getLogger("oktopk")
RESUME = "the same command with --resume goes on from the last checkpoint"
ENDED_BY_HAND = (2, 130, 143)


def command(args: argparse.Namespace, argv: list[str]) -> int:
    """Start the workers, or be one of them."""
    try:
        config = resolve(args)
    except ValueError as error:
        sys.stderr.write(f"oktopk train: {error}\n")
        return 2
    place = find_place()
    workers = workers_to_start(place, getattr(args, "workers", None), config.workers)
    try:
        if workers or place is None:  # ranks of a launcher must not fail one by one
            check_first(config)
        if workers:
            return start(workers, argv, config, args.resume)
        return work(config, place or ALONE, args.resume, given(args))
    except (RunError, FileError, OSError) as error:
        sys.stderr.write(f"oktopk train: {error}\n")
        return 1


def resolve(args: argparse.Namespace) -> Config:
    """The config and the flags; a run that is resumed goes on with its own settings and the flags.

    So the same command with --resume starts a run and continues it.
    """
    config = with_flags(load(args.config or DEFAULT), args)
    if args.resume:
        runs = Path(config.runs)
        number = resumable(runs, config.name) or newest(runs, config.name)
        own = numbered(runs, config.name, number) / SETTINGS
        if own.exists():
            return with_flags(load_run(own), args)
    return config


def check_first(config: Config) -> None:
    """What can be seen before any process is started: a place to write to, manifests, a voice."""
    check_writable(Path(config.runs))
    if config.data:
        find_manifests(config.data)
    elif not spoken_folder(config).exists():
        require("oktopk train without --data", "espeakng_loader")


def start(workers: int, argv: list[str], config: Config, resume: bool) -> int:
    """Run the workers. When a new run fails, advise --resume only where it has a checkpoint."""
    runs = Path(config.runs)
    before = newest(runs, config.name)
    code = start_workers(workers, argv)
    failed = code and code not in ENDED_BY_HAND
    if failed and not resume and resumable(runs, config.name) > before:
        sys.stderr.write(f"oktopk train: {RESUME}\n")
    return code


def work(config: Config, place: Place, resume: bool, given: Collection[str]) -> int:
    """One worker's whole life."""
    logging.basicConfig(
        level=logging.INFO if place.rank == 0 else logging.WARNING,
        format="%(message)s",
        handlers=[LineHandler()],
    )
    started = time.monotonic()
    with joined(place, config.timeout, alike(config, resume)) as device:
        folder, result, totals = run_all(config, device, place, resume, given)
    if place.rank == 0:
        say(summary(result, totals, time.monotonic() - started, folder, place.size))
    return 0


def run_all(
    config: Config,
    device: torch.device,
    place: Place,
    resume: bool,
    given: Collection[str] = (),
) -> tuple[Path, Validation | None, Totals]:
    """Train in a folder of its own. With `resume` only the settings in `given` may have changed."""
    comm, started = comm_of_job(config.timeout), time.monotonic()
    with Warnings() as warnings:
        run = set_up(config, comm, device, place)  # first: what fails here leaves no folder
        try:
            with make_folder(config, comm, device, resume) as folder, reported(folder, comm.rank):
                journal_bytes = find_and_restore(run, folder, given) if resume else 0
                # not before: a resume that fails must leave the run as it is
                together(comm, device, f"writing {SETTINGS}", lambda: write_config(run, folder))
                return folder, *run_in(folder, run, journal_bytes, warnings, started)
        finally:
            run.handle.close()


def write_config(run: Run, folder: Path) -> None:
    """Write the settings of the run, on rank 0."""
    if run.comm.rank == 0:
        write_whole(folder / SETTINGS, to_toml(run.config))


def run_in(
    folder: Path, run: Run, journal_bytes: int, warnings: Warnings, started: float
) -> tuple[Validation | None, Totals]:
    """From the first step to the last validation."""
    try:
        with Recorder(run, folder, journal_bytes, warnings) as recorder:
            recorder.say(opening(run, folder))
            result = train(run, recorder, folder)
            totals = run.totals.of_all(run.comm, run.device)
            recorder.end(totals, time.monotonic() - started)
        return result, totals
    except RuntimeError as error:
        if run.handle.failure is None:
            raise
        # DDP wraps it in a message of its own
        advice = f"; {RESUME}" if has_checkpoint(folder) else ""
        raise RunError(f"{run.handle.failure}{advice}") from error


@contextmanager
def make_folder(config: Config, comm: Comm, device: torch.device, resume: bool) -> Iterator[Path]:
    """The folder of the run, the same on every rank: rank 0 chooses its number and locks it."""
    runs = Path(config.runs)
    chosen = together(
        comm,
        device,
        f"making a folder in {runs}",
        lambda: make(runs, config.name, resume) if comm.rank == 0 else 0,
    )
    folder = numbered(runs, config.name, comm.all_gather_size(chosen, device, stage="run")[0])

    def enter() -> AbstractContextManager[object]:
        folder.mkdir(parents=True, exist_ok=True)  # on machines that do not share it
        return lock(folder) if comm.rank == 0 else nullcontext()

    with together(comm, device, f"using the folder {folder}", enter):
        yield folder


@contextmanager
def reported(folder: Path, rank: int) -> Iterator[None]:
    """Write the report when the run ends, however it does. A run is not lost with its report."""
    try:
        yield
    finally:
        if rank == 0:
            try:
                report(folder)
            except OSError as error:
                log.warning("no report was written: %s", error)
            except Exception:  # it must not stand in the place of what ended the run
                log.exception("no report was written; `oktopk report %s` tries again", folder)


def find_and_restore(run: Run, folder: Path, given: Collection[str]) -> int:
    """Go on from the newest whole checkpoint, if there is one."""
    path = checkpoint.find(folder / CHECKPOINTS, run.comm, run.device)
    if path is None:
        log.info("%s has no checkpoint yet: starting from the beginning", folder)
        return 0
    last = numbered(folder.parent, run.config.name, newest(folder.parent, run.config.name))
    if last != folder:
        log.info("%s is newer, but has no checkpoint", last)
    journal_bytes = together(
        run.comm, run.device, f"loading {path}", lambda: restore(run, path, given)
    )
    log.info("resuming from %s", path)
    return journal_bytes


def opening(run: Run, folder: Path) -> str:
    """What is about to happen."""
    config, corpus, model = run.config, run.corpus, run.model
    hours = sum(utterance.seconds for utterance in corpus.train) / 3600
    numel = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{folder}: lstman4 with {numel:,} parameters, {len(corpus.train)} + {len(corpus.test)} "
        f"utterances ({hours:.2f} h)\n"
        f"{run.comm.size} worker{'s' * (run.comm.size > 1)} x batch {config.batch} on "
        f"{run.device.type}: "
        f"{run.steps_per_epoch} steps an epoch, {run.total_steps} in all, {_phases(run)}"
    )


def _phases(run: Run) -> str:
    config, dense = run.config, min(run.config.warmup_steps, run.total_steps)
    method = run.handle.settings.method
    if method == "dense" or dense == run.total_steps:
        return "all of them dense"
    ramp = f"{config.ramp_steps} from 25 % down, " if config.ramp_steps else ""
    return f"{dense} of them dense, {ramp}then {method} at density {config.density:g}"
