"""Trials one after the other, until the budget is spent."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from oktopk.compare.results import METRICS
from oktopk.report.texttable import markdown
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
from oktopk.sweep.trial import Outcome, log_of, run_trial
from oktopk.train.config import load
from oktopk.train.console import say
from oktopk.train.run_process import command_line, tail
from oktopk.utils.files import write_whole

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

PATIENCE = 5
"""Failures in a row after which something else than the settings must be wrong."""
SHOWN = 10


def sweep(plan: Plan, number: int, deadline: float, prune: bool) -> int:
    """Trials until there are so many or the time is up; 0 when any has finished."""
    failures = 0
    with opened(plan.folder, plan.base.seed) as study:
        begin(study, plan.base, plan.space)
        found, line = sum_up(plan, study)
        while len(_done(study)) < number and time.monotonic() < deadline:
            trial, name = ask(study, plan.space)
            place = f"{name.replace('-', ' ')} ({len(_done(study)) + 1} of {_said(number)})"
            outcome = attempt(plan, study, trial, name, place, deadline, prune)
            found, line = sum_up(plan, study)
            if outcome.state is None:
                break
            failures = failures + 1 if outcome.state == "FAIL" else 0
            if failures == PATIENCE:
                say(f"{PATIENCE} trials failed one after the other: the sweep ends here")
                break
        _close(plan, found, line, len(_done(study)), len(trials(study)))
        return 0 if best(found) else 1


def _done(study: Study) -> list[str]:
    return [name for name, trial in trials(study).items() if trial.state.is_finished()]


def _said(number: int) -> str:
    return "any number" if number == sys.maxsize else str(number)


def attempt(
    plan: Plan, study: Study, trial: Trial, name: str, place: str, deadline: float, prune: bool
) -> Outcome:
    """One trial from its first line to its last; Optuna is told how it ended."""
    config = plan.of(values(trial.params), name)
    shown = ", ".join(f"{name} {value:g}" for name, value in values(trial.params).items())
    say(f"{place}: {shown}")

    def report(step: int, value: float) -> bool:
        trial.report(value, step)
        return prune and trial.should_prune()

    outcome = run_trial(config, plan.config, plan.metric, report, deadline)
    if outcome.state is not None:
        tell(study, trial, outcome.state, outcome.value)
    say(f"{place}: {_verdict(plan, outcome)}")
    if outcome.state == "FAIL":
        say(f"{log_of(config)}:\n{tail(log_of(config))}")
    return outcome


def _verdict(plan: Plan, outcome: Outcome) -> str:
    said = {
        "COMPLETE": f"finished, {METRICS[plan.metric]} {outcome.value or 0:.3f}",
        "PRUNED": "ended early: worse than half of the others were by then",
        "FAIL": f"failed: {outcome.text}",
        None: "the time is up; it was saved, and the same command goes on with it",
    }
    return said[outcome.state]


def sum_up(plan: Plan, study: Study) -> tuple[list[Result], str]:
    """Write the tables and the report; the results and the command line of the best."""
    found = results(plan.folder, plan.metric, trials(study))
    if not found:
        return [], ""
    first = best(found)
    line = ""
    if first:
        final = plan.of(first.values, f"{plan.folder.name}-best")
        own = {"runs": str(plan.folder.parent), "keep": load(plan.config).keep}
        line = command_line(replace(final, **own), plan.config)
    order = ranked(found)
    write_whole(plan.folder / "table.md", markdown(as_table(order, plan.metric)))
    write_whole(plan.folder / "table.json", json.dumps(as_plain(order), indent=1) + "\n")
    path = plan.folder / "sweep.html"
    write_report(path, found, plan.space, plan.metric, importances(study), line)
    return found, line


def _close(plan: Plan, found: list[Result], line: str, done: int, begun: int) -> None:
    if not found:
        say("no trial has begun: raise --minutes or --trials")
        return
    say(f"\n{markdown(as_table(ranked(found)[:SHOWN], plan.metric))}")
    say(f"{done} trials, {begun - done} half-way; {plan.folder}: table.md, table.json, sweep.html")
    if line:
        say(f"the best: {line}")
