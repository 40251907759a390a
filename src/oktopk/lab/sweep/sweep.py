# SPDX-License-Identifier: Apache-2.0
"""`oktopk sweep`: search for the best settings of `oktopk train` within a budget."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from oktopk.errors import RunError
from oktopk.lab.compare.compare import RunProgress
from oktopk.lab.compare.plan import SWEEP, refuse_comparison, refuse_run
from oktopk.lab.report.page import markdown, show
from oktopk.lab.runlog.reader import CHECKPOINT_FOLDER, lock, read_runlog
from oktopk.lab.runlog.schema import Record, ValidationRecord
from oktopk.lab.sweep.results import (
    COMPLETE,
    FAILED,
    PRUNED,
    SEARCHED,
    Range,
    Result,
    add_ranges,
    as_plain,
    as_table,
    ask,
    begin,
    best,
    importances,
    opened,
    parse,
    ranked,
    results,
    tell,
    trials,
    values,
    write_report,
)
from oktopk.lab.tasks.base import Metric
from oktopk.lab.tasks.registry import find_metric
from oktopk.lab.train.config import Config, as_dict
from oktopk.lab.train.config_files import add_config_flag, load, load_with_flags
from oktopk.lab.train.config_files import add_flags as add_train_flags
from oktopk.lab.train.console import print_line
from oktopk.lab.train.run_process import (
    IRRELEVANT_SETTINGS,
    command_line,
    directory_of,
    exit_code_of,
    last_lines,
    log_of,
    train_in_process,
)
from oktopk.lab.train.setup import check_before_start
from oktopk.utils.arguments import format_metric
from oktopk.utils.files import read_json, write_atomically
from oktopk.utils.signals import raise_on_signals

# The plan of a sweep, which a later call must match to continue it.


class StoredPlan(msgspec.Struct, frozen=True):
    """`sweep.json`: what must be the same in a later call."""

    metric: str
    space: dict[str, Range]
    config: dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is searched: the ranges, the config for everything else, and the metric."""

    config: str
    base: Config
    space: dict[str, Range]
    metric: Metric

    @property
    def folder(self) -> Path:
        return Path(self.base.runs)

    def of(self, values: dict[str, Any], name: str) -> Config:
        """The config of a trial."""
        return replace(self.base, name=name, **values)


def store_or_compare(plan: Plan) -> None:
    """Store the plan; if there is one already, raise unless it is the same."""
    path = plan.folder / SWEEP
    own = {name: v for name, v in as_dict(plan.base).items() if name not in IRRELEVANT_SETTINGS}
    now = StoredPlan(plan.metric.name, plan.space, own)
    if not path.exists():
        write_atomically(path, json.dumps(msgspec.to_builtins(now), indent=1) + "\n")
        return
    before = read_json(path, StoredPlan, advice="move the folder away, or give another --name")
    flat_before, flat_now = (
        {"metric": each.metric} | each.config | {name: str(one) for name, one in each.space.items()}
        for each in (before, now)
    )
    for name in flat_before.keys() | flat_now.keys():
        old, new = flat_before.get(name), flat_now.get(name)
        if old != new:
            raise RunError(
                f"{plan.folder} is a sweep with {name} {old}, and this is {new}: give another "
                "--name, or the flags of that sweep"
            )


# One trial of a sweep: a training run that is ended early when it is not promising.


Report = Callable[[int, float], bool]
"""Takes a step and the metric at that step, and says whether to prune the trial."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended. Without a state it was interrupted, and a later call continues it."""

    state: str | None
    value: float | None = None
    text: str = ""


class Pruner:
    """Reports new validations, and decides whether a trial is to be ended early."""

    def __init__(self, metric: str, report: Report, deadline: float) -> None:
        self.metric, self._report, self._deadline = metric, report, deadline
        self._reported: set[int] = set()
        self.pruned = False

    def should_stop(self, records: list[Record]) -> bool:
        """Whether the trial is not promising, or the time is up."""
        for record in records:
            if isinstance(record, ValidationRecord):
                self._take(record)
        return self.pruned or time.monotonic() > self._deadline

    def _take(self, record: ValidationRecord) -> None:
        value = record.metrics.get(self.metric)
        if value is None or record.step in self._reported:  # a resumed run writes records again
            return
        self._reported.add(record.step)
        # the first validation says too little to prune by
        self.pruned = self._report(record.step, value) and len(self._reported) > 1


def run_trial(config: Config, base: str, pruner: Pruner, progress: RunProgress) -> Outcome:
    """Train a config until it ends or the pruner ends it; it saves before. `progress` shows it."""

    def should_stop(records: list[Record]) -> bool:
        progress(records)
        return pruner.should_stop(records)

    directory = directory_of(config)
    runlog = read_runlog(directory)
    if not runlog.finished:  # a run may have finished just before an earlier sweep was ended
        with progress:
            result = train_in_process(config, base, should_stop)
        runlog = result.runlog
        if result.exit_code is None and not pruner.pruned:
            return Outcome(None)
        if result.exit_code is None:
            shutil.rmtree(directory / CHECKPOINT_FOLDER, ignore_errors=True)
            return Outcome(PRUNED)
        if result.exit_code:
            return Outcome(FAILED, text=f"exit code {result.exit_code}")
    value = runlog.validations[-1].metrics.get(pruner.metric) if runlog.validations else None
    if value is None:
        return Outcome(FAILED, text=f"the run ended without a {pruner.metric}")
    return Outcome(COMPLETE, value)


# Run trials one after the other until the budget is spent.


if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

MAX_FAILURES = 5
"""Failures in a row that end a sweep: the cause is then not in the settings."""
SHOWN = 10


def sweep(plan: Plan, number: int, deadline: float, prune: bool) -> int:
    """Run trials until there are `number` of them or the time is up.

    Returns the exit code: 0 if any trial has finished.
    """
    failures = 0
    with opened(plan.folder, plan.base.seed, plan.metric.higher_is_better) as study:
        begin(study, plan.base, plan.space)
        found, line = write_tables(plan, study)
        while len(_done(study)) < number and time.monotonic() < deadline:
            trial, name = ask(study, plan.space)
            done = len(_done(study))
            place = f"{name.replace('-', ' ')} ({done + 1} of {_limit(number)})"
            progress = RunProgress(
                place,
                plan.of(values(trial.params), name),
                0 if number == sys.maxsize else number - done - 1,
            )
            outcome = attempt(plan, study, trial, progress, deadline, prune)
            found, line = write_tables(plan, study)
            if outcome.state is None:
                break
            failures = failures + 1 if outcome.state == "FAIL" else 0
            if failures == MAX_FAILURES:
                print_line(f"{MAX_FAILURES} trials failed one after the other: the sweep ends here")
                break
        _finish(plan, found, line, len(_done(study)), len(trials(study)))
        return 0 if best(found, plan.metric) else 1


def _done(study: Study) -> list[str]:
    return [name for name, trial in trials(study).items() if trial.state.is_finished()]


def _limit(number: int) -> str:
    return "any number" if number == sys.maxsize else str(number)


def attempt(
    plan: Plan, study: Study, trial: Trial, progress: RunProgress, deadline: float, prune: bool
) -> Outcome:
    """Run one trial, print its result, and tell Optuna how it ended."""
    config, place = progress.config, progress.place
    shown = ", ".join(f"{name} {value:g}" for name, value in values(trial.params).items())
    print_line(f"{place}: {shown}")

    def report(step: int, value: float) -> bool:
        trial.report(value, step)  # in the study's direction, that of the metric
        return prune and trial.should_prune()

    pruner = Pruner(plan.metric.name, report, deadline)
    outcome = run_trial(config, plan.config, pruner, progress)
    if outcome.state is not None:
        tell(study, trial, outcome.state, outcome.value)
    print_line(f"{place}: {_result(plan, outcome)}")
    if outcome.state == "FAIL":
        print_line(f"{log_of(config)}:\n{last_lines(log_of(config))}")
    return outcome


def _result(plan: Plan, outcome: Outcome) -> str:
    texts = {
        "COMPLETE": f"finished, {plan.metric.label} {format_metric(outcome.value or 0)}",
        "PRUNED": "ended early: worse than the median of the others at the same step",
        "FAIL": f"failed: {outcome.text}",
        None: "the time is up; it was saved, and the same command continues it",
    }
    return texts[outcome.state]


def write_tables(plan: Plan, study: Study) -> tuple[list[Result], str]:
    """Write the tables and the report. Returns the results and the command of the best trial."""
    found = results(plan.folder, plan.metric, trials(study))
    if not found:
        return [], ""
    first = best(found, plan.metric)
    line = ""
    if first:
        final = plan.of(first.values, f"{plan.folder.name}-best")
        own = {"runs": str(plan.folder.parent), "keep": load(plan.config, plan.base.task).keep}
        line = command_line(replace(final, **own), plan.config)
    order = ranked(found, plan.metric)
    write_atomically(plan.folder / "table.md", markdown(as_table(order, plan.metric)))
    write_atomically(plan.folder / "table.json", json.dumps(as_plain(order), indent=1) + "\n")
    path = plan.folder / "sweep.html"
    write_report(path, found, plan.space, plan.metric, importances(study), line)
    return found, line


def _finish(plan: Plan, found: list[Result], line: str, done: int, begun: int) -> None:
    if not found:
        print_line("no trial has begun: raise --minutes or --trials")
        return
    print_line("")
    show(markdown(as_table(ranked(found, plan.metric)[:SHOWN], plan.metric)))
    print_line(
        f"{done} trials, {begun - done} half-way; {plan.folder}: table.md, table.json, sweep.html"
    )
    if line:
        print_line(f"the best: {line}")


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
