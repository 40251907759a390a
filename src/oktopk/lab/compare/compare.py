# SPDX-License-Identifier: Apache-2.0
"""`oktopk compare`: the same training under several methods, one after the other."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import IO, Any

from oktopk.errors import RunError
from oktopk.lab.compare.networks import check_networks, timing_run
from oktopk.lab.compare.plan import (
    RACED,
    plan,
    refuse_files,
    refuse_others,
    refuse_run,
    refuse_sweep,
)
from oktopk.lab.compare.results import result_line, timing_line, write_tables
from oktopk.lab.runlog.reader import RunLog, lock, read_runlog
from oktopk.lab.runlog.schema import Record, RunRecord, StepRecord, ValidationRecord
from oktopk.lab.tasks.base import number_or_auto
from oktopk.lab.tasks.registry import find_metric, task_type
from oktopk.lab.train.config import Config
from oktopk.lab.train.config_files import add_config_flag, given, load_with_flags
from oktopk.lab.train.config_files import add_flags as add_train_flags
from oktopk.lab.train.console import print_line, time_left
from oktopk.lab.train.run_process import (
    directory_of,
    exit_code_of,
    last_lines,
    log_of,
    train_in_process,
)
from oktopk.lab.train.setup import (
    Target,
    check_before_start,
    parse_target,
    prepare_data,
    prepare_kernels,
)
from oktopk.launch import network
from oktopk.utils.arguments import format_duration, format_metric
from oktopk.utils.signals import raise_on_signals

# What a comparison shows while a run trains: one line that says how far it is.


LINE_SECONDS = 15.0
"""Seconds between two lines of output, when stdout is not a terminal."""


class RunProgress:
    """Follows the records of a run, and shows a line about it.

    On a terminal the line is rewritten in place; elsewhere a line is printed now and then.
    """

    def __init__(self, place: str, config: Config, runs_after: int) -> None:
        self.place, self.config, self._runs_after = place, config, runs_after
        self._info: RunRecord | None = None
        self._steps, self._seconds = 0, 0.0
        self._metric = ""
        self._on_terminal = sys.stdout.isatty()
        self._due = time.monotonic() + LINE_SECONDS
        self._width = 0

    def __call__(self, records: list[Record]) -> bool:
        """Take the new records. Never asks for the run to end."""
        for record in records:
            self._take(record)
        if self._on_terminal:
            text = self.line()[: get_terminal_size().columns - 1]  # a line that wraps stays
            sys.stdout.write(f"\r{text:{self._width}}")
            sys.stdout.flush()
            self._width = len(text)
        elif time.monotonic() >= self._due:
            print_line(self.line())
            self._due = time.monotonic() + LINE_SECONDS
        return False

    def _take(self, record: Record) -> None:
        match record:
            case RunRecord():
                self._info = record
                if record.step == 0:  # a resumed run writes its file again: count from the start
                    self._steps, self._seconds, self._metric = 0, 0.0, ""
            case StepRecord():
                self._steps = record.step + 1
                self._seconds += record.whole or 0.0
            case ValidationRecord():
                self._metric = self._shown(record)
            case _:
                pass

    def _shown(self, record: ValidationRecord) -> str:
        metrics = self._info.task.metrics if self._info and self._info.task else []
        for metric in metrics[:1]:
            value = record.metrics.get(metric.name)
            if value is not None:
                return f"{metric.label} {format_metric(value)}"
        return ""

    def line(self) -> str:
        """How far the run is, and how long it may still take."""
        if not self._steps:
            return f"{self.place}: starting"
        total = self._info.total_steps if self._info else None
        parts = [f"step {self._steps}" + (f" of {total}" if total else ""), self._metric]
        parts.append(f"{format_duration(self._seconds)} of training")
        left = self._seconds_left(total)
        if left is not None:
            parts.append(time_left(left, self.config))
        if self._runs_after:
            parts.append(f"{self._runs_after} more to train{self._all_left(left)}")
        return f"{self.place}: {', '.join(filter(None, parts))}"

    def _all_left(self, left: float | None) -> str:
        """The time until the end of the last run, where every run has the same limit of time."""
        if left is None or not self.config.max_minutes:
            return ""
        most = left + 60 * self.config.max_minutes * self._runs_after
        return f" (at most {format_duration(most)} in all)"

    def _seconds_left(self, total: int | None) -> float | None:
        """Seconds of training until the last step, or until the limit of time."""
        limits = []
        if total:
            limits.append(self._seconds / self._steps * max(0, total - self._steps))
        if self.config.max_minutes:
            limits.append(max(0.0, 60 * self.config.max_minutes - self._seconds))
        return min(limits, default=None)

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the line; after Ctrl-C it stays, with what the terminal wrote behind it."""
        if self._on_terminal and self._width:
            sys.stdout.write("\n" if kind else f"\r{'':{self._width}}\r")
            sys.stdout.flush()


NAME = "compare"
WRONG = {
    "methods": "is not a method: give their names with commas between them",
    "densities": "is not a density: give numbers with commas between them, or auto",
    "seeds": "is not a seed: give whole numbers with commas between them",
    "networks": "is not a network: give rates with commas between them, as in 1gbit,50mbit",
}
"""What is said of a wrong value in a list."""
RESOLUTION = (
    "the target is looked for every {} epochs, when a run is validated: times to it are no finer; "
    "--validate-steps 25 looks every 25 steps"
)
CONTINUED = "the same command continues: what has finished is not trained again"
# flags that take a list, and the flag of `oktopk train` that takes one value
LISTS = {"methods": "method", "densities": "density", "seeds": "seed"}


def add_flags(parser: argparse.ArgumentParser, config: Config) -> None:
    """The flags of `oktopk compare`, and all those of `oktopk train`."""
    parser.add_argument(
        "--methods",
        help=f"comma-separated (default: dense and the config's; with --until {','.join(RACED)}); "
        "local_steps:5@0.1 exchanges every 5 steps, at density 0.1",
    )
    parser.add_argument("--densities", help="comma-separated (default: the config's)")
    parser.add_argument("--seeds", help="comma-separated (default: the config's)")
    parser.add_argument(
        "--networks",
        help="comma-separated rates, as in 1gbit,50mbit: after the training, measure the steps of "
        "every run there, and say when it would have reached the target",
    )
    parser.add_argument("--metric", help="what the figures show (default: the task's first)")
    add_config_flag(parser)
    add_train_flags(parser, config, without=("name",))
    parser.add_argument("--name", default=NAME, help="folder in RUNS, with a folder for each run")


def command(args: argparse.Namespace) -> int:
    """Train the runs that are not finished, then write the tables of all runs in the folder."""

    def act() -> int:
        base, wanted = resolve(args)
        networks = _list("networks", args.networks, str)
        check_networks(networks, base, wanted)
        metric, target = metric_and_target(base, args.metric)
        folder = Path(base.runs)
        refuse_run(folder)
        refuse_sweep(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder), raise_on_signals():
            return compare(Comparison(args.config or "", base, wanted, networks, metric, target))

    return exit_code_of("oktopk compare", act)


def resolve(args: argparse.Namespace) -> tuple[Config, list[Config]]:
    """The config that all runs have in common, with the folder of the comparison, and the runs."""
    for several, one in LISTS.items():
        if getattr(args, several) is not None and hasattr(args, one):
            raise ValueError(f"--{several} and --{one}: give one of them")
    base = load_with_flags(args)
    base = replace(base, runs=str(Path(base.runs) / base.name))
    usual = dict.fromkeys([*(RACED if base.until else ("dense",)), base.method])
    methods = _list("methods", args.methods, str) or usual
    densities = _list("densities", args.densities, number_or_auto(float)) or [base.density]
    seeds = _list("seeds", args.seeds, int) or [base.seed]
    by_flag = {*given(args, base.task), *(["density"] if args.densities else [])}
    return base, plan(base, methods, densities, seeds, by_flag)


def _list(name: str, text: str | None, kind: Callable[[str], Any]) -> list:
    """The values of a flag, each once. ValueError names the one that is wrong."""
    if text is None:
        return []
    return list(dict.fromkeys(_value(name, text, item.strip(), kind) for item in text.split(",")))


def _value(name: str, text: str, item: str, kind: Callable[[str], Any]) -> Any:
    if item:
        with suppress(ValueError):
            return kind(item)
    raise ValueError(f"--{name} {text!r}: {item!r} {WRONG[name]}")


def metric_and_target(base: Config, asked: str | None) -> tuple[str, Target | None]:
    """The metric to show, and the target of the race. ValueError if the task has no such metric."""
    check_before_start("oktopk compare", base)
    target = parse_target(base.until, task_type(base.task).metrics) if base.until else None
    if asked is None and target is not None:
        return target.metric.name, target
    return find_metric(base.task, asked).name, target


def lock_folder(folder: Path) -> IO[str]:
    """Keep other comparisons out of the folder for as long as the file is open."""
    try:
        return lock(folder)
    except RunError as error:
        raise RunError(
            f"another comparison is using {folder}: wait for it or end it, or give another --name"
        ) from error


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `oktopk compare` was asked for."""

    config: str
    base: Config
    wanted: list[Config]
    networks: list[str]
    """Where the steps of every run are timed after the training."""

    metric: str
    target: Target | None


def compare(asked: Comparison) -> int:
    """Train what is missing and write the tables. Returns 1 if a run failed."""
    base, wanted, folder = asked.base, asked.wanted, Path(asked.base.runs)
    refuse_others(folder, base, wanted, asked.networks)
    refuse_files(wanted)
    if asked.target and not base.validate_steps:
        print_line(RESOLUTION.format(base.validate_every))
    if base.network and not network.is_permitted():
        sys.stderr.write(f"{network.fallback(base.network)}\n")
    short = [timing_run(run, place) for place in asked.networks for run in wanted]
    timed = list({directory_of(run): run for run in short}.values())  # one for all seeds
    if not all(read_runlog(directory_of(run)).finished for run in (*wanted, *timed)):
        prepare_data(base)
        prepare_kernels()
    result = partial(result_line, target=asked.target)
    runs = [(run, result) for run in wanted] + [(run, timing_line) for run in timed]
    failed, table = [], ""
    for number, (run, line) in enumerate(runs, 1):
        place = f"{number}/{len(runs)} {_shown(run)}"
        try:
            progress = RunProgress(place, run, len(runs) - number)
            if not train(asked.config, run, place, line, progress):
                failed.append(run)
        except KeyboardInterrupt:
            print_line(CONTINUED)
            raise
        finally:  # also when the comparison is interrupted
            table = write_tables(folder, asked.metric, asked.target, asked.networks)
    print_line(f"\n{_wrapped(table)}")
    for run in failed:
        sys.stderr.write(f"oktopk compare: {_shown(run)} failed, see {log_of(run)}\n")
    if failed:
        sys.stderr.write("the same command tries the failed runs again, and only those\n")
    return 1 if failed else 0


def _shown(run: Config) -> str:
    return f"{run.name} at {run.network}" if run.network else run.name


def _wrapped(text: str) -> str:
    """The text with its sentences wrapped to the width of the terminal, if it is one."""
    if not sys.stdout.isatty():
        return text
    width = get_terminal_size().columns
    return "\n".join(
        line if len(line) <= width or "  " in line else fill(line, width)  # a row has gaps
        for line in text.splitlines()
    )


def train(
    config: str, run: Config, place: str, line: Callable[[RunLog], str], progress: RunProgress
) -> bool:
    """Train one run unless it is finished, and print its line. Returns whether it finished."""
    directory, log = directory_of(run), log_of(run)
    log.parent.mkdir(parents=True, exist_ok=True)
    before = read_runlog(directory)
    if before.finished:
        print_line(f"{place}: {line(before)} (finished before)")
        return True
    print_line(f"{place}: training; to look: oktopk watch {directory}")
    with progress:
        result = train_in_process(run, config, progress)
    if result.exit_code == 0 and result.runlog.finished:
        print_line(f"{place}: {line(result.runlog)}")
        return True
    print_line(f"{place}: failed with exit code {result.exit_code}, in {log}:\n{last_lines(log)}")
    return False
