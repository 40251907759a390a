# SPDX-License-Identifier: Apache-2.0
"""Run trials one after the other until the budget is spent."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from oktopk.compare.progress import RunProgress
from oktopk.report.texttable import markdown, show
from oktopk.sweep.page import write_report
from oktopk.sweep.plan import Plan
from oktopk.sweep.results import (
    Result,
    as_plain,
    as_table,
    best,
    ranked,
    results,
)
from oktopk.sweep.study import (
    ask,
    begin,
    importances,
    opened,
    tell,
    trials,
    values,
)
from oktopk.sweep.trial import Outcome, Pruner, run_trial
from oktopk.train.config_files import load
from oktopk.train.console import print_line
from oktopk.train.run_process import command_line, last_lines, log_of
from oktopk.utils.files import write_atomically
from oktopk.utils.units import format_metric

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
        _close(plan, found, line, len(_done(study)), len(trials(study)))
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


def _close(plan: Plan, found: list[Result], line: str, done: int, begun: int) -> None:
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
