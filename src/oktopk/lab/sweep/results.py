# SPDX-License-Identifier: Apache-2.0
"""The trials of a sweep: the space they are from, where they are stored, and their report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from oktopk.lab.compare.results import row
from oktopk.lab.report.charts import LOG
from oktopk.lab.report.page import Figure, Section, paragraph, rounded, table, write_page
from oktopk.lab.runlog.reader import read_runlog
from oktopk.lab.tasks.base import AUTO, Metric
from oktopk.lab.train.config import COMMON, Config
from oktopk.utils.arguments import format_bytes, format_metric
from oktopk.utils.files import error_summary, file_error

# The search space: ranges of settings, from flags such as `--lr 1e-4:1e-2`.


@dataclass(frozen=True, slots=True)
class Range:
    """Values from `low` to `high`, both included. `by_ratio` samples their logarithm."""

    low: float
    high: float
    by_ratio: bool
    whole: bool

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"

    def has(self, value: float | Literal["auto"]) -> bool:
        return value != AUTO and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Searchable:
    """A setting that can be searched. `usual` gives its default range; None: it is not searched."""

    by_ratio: bool
    usual: Callable[[Config], tuple[float, float] | None]
    help: str
    """The default range in words."""


def _if_sparse(low: float, high: float) -> Callable[[Config], tuple[float, float] | None]:
    return lambda config: None if config.method == "dense" else (low, high)


def _warmup_range(config: Config) -> tuple[float, float] | None:
    if config.method == "dense" or config.warmup_steps == AUTO:
        return None
    return 0, max(2 * config.warmup_steps, 64)


SEARCHED: dict[str, Searchable] = {
    "lr": Searchable(
        True, lambda config: (config.lr / 4, config.lr * 4), "a quarter to four times the config's"
    ),
    "density": Searchable(True, _if_sparse(0.005, 0.2), "0.005:0.2"),
    "warmup_steps": Searchable(
        False,
        _warmup_range,
        "0 to twice the config's, if that is a number",
    ),
    "exact_every": Searchable(
        True, lambda config: (8, 128) if config.method == "oktopk" else None, "8:128 for oktopk"
    ),
    "bounds_every": Searchable(True, lambda config: None, "the config's"),
    "ramp_steps": Searchable(False, lambda config: None, "the config's"),
    "weight_decay": Searchable(True, lambda config: None, "the config's"),
}


def add_ranges(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting that can be searched."""
    for name, one in SEARCHED.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="LOW:HIGH",
            default=None,
            help=f"a range to search, or a value; default: {one.help}",
        )


def parse(base: Config, given: dict[str, str | None]) -> tuple[Config, dict[str, Range]]:
    """The config with single values applied, and the ranges. Both ends of a range must be valid."""
    space: dict[str, Range] = {}
    for name, one in SEARCHED.items():
        whole = COMMON[name].metadata["type"] is int
        text = given.get(name)
        if text == AUTO and COMMON[name].metadata["or_auto"]:
            base = replace(base, **{name: AUTO})
            continue
        ends = one.usual(base) if text is None else _ends(name, text, whole)
        if ends is None:
            continue
        least, most = (
            replace(base, **{name: end}) for end in ends
        )  # raises if the value is not valid
        if least == most:
            base = least
        else:
            space[name] = Range(*ends, one.by_ratio, whole)
    _check(space)
    return base, space


def _ends(name: str, text: str, whole: bool) -> tuple[float, float]:
    flag = f"--{name.replace('_', '-')}"
    try:
        ends = [int(part) if whole else float(part) for part in text.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2):
        kind = "whole numbers" if whole else "numbers"
        raise ValueError(f"{flag} {text!r}: a range LOW:HIGH of {kind}, or a single one")
    if ends[0] > ends[-1]:
        raise ValueError(f"{flag} {text}: the lower end comes first")
    return ends[0], ends[-1]


def _check(space: dict[str, Range]) -> None:
    if not space:
        raise ValueError("nothing to search: give at least one range, such as --lr 1e-3:1e-2")
    for name, one in space.items():
        if one.by_ratio and one.low <= 0:
            raise ValueError(f"{name} is searched by ratio: its range {one} must be above 0")


# The search, by Optuna, which stores its trials in the folder of the sweep.
#
# A trial belongs to a run directory. When a sweep is interrupted, its last trial cannot be
# continued in Optuna. The next call adds a second trial with the same values and the same
# directory, where the training resumes from its checkpoint.


# Optuna is imported inside functions, because the rest of the command line does not need it


if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

STORAGE = "optuna.db"
FOLDER = "folder"
STARTUP_TRIALS = 4
"""Trials with random values, before Optuna learns from them and prunes."""
COMPLETE, PRUNED, FAILED = "COMPLETE", "PRUNED", "FAIL"
MIN_FOR_IMPORTANCES = 4
"""Finished trials that are needed to compute importances."""
DIGITS = 4


@contextmanager
def opened(folder: Path, seed: int, higher_is_better: bool) -> Iterator[Study]:
    """Create the study in a folder, or open the one that is there."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = folder / STORAGE
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        study = optuna.create_study(
            storage=storage,
            study_name="sweep",
            load_if_exists=True,
            direction="maximize" if higher_is_better else "minimize",
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS, n_min_trials=3),
        )
        before = study.get_trials(deepcopy=False)
    except Exception as error:  # of SQLite, SQLAlchemy, Alembic or Optuna
        problem = f"Optuna cannot open it ({error_summary(error)})"
        advice = "move the folder away, or give another --name"
        raise file_error(path, problem, advice=advice) from error
    # a continued sweep must not draw the same values again; NumPy takes 32 bits
    start = (seed + len(before)) % 2**32
    study.sampler = optuna.samplers.TPESampler(seed=start, n_startup_trials=STARTUP_TRIALS)
    try:
        yield study
    finally:
        storage.remove_session()
        storage.engine.dispose()


def begin(study: Study, base: Config, space: dict[str, Range]) -> None:
    """Queue the first trials: the config itself, or what an earlier call left unfinished."""
    before = study.get_trials(deepcopy=False)
    own = {name: getattr(base, name) for name in space}
    if not before and all(space[name].has(value) for name, value in own.items()):
        study.enqueue_trial(own)
    for trial in before:
        if trial.state.name != "RUNNING":
            continue
        if FOLDER in trial.user_attrs:
            study.enqueue_trial(trial.params, user_attrs={FOLDER: trial.user_attrs[FOLDER]})
        _close(study, trial.number, FAILED)


def ask(study: Study, space: dict[str, Range]) -> tuple[Trial, str]:
    """The next trial and its folder's name."""
    trial = study.ask({name: _distribution(one) for name, one in space.items()})
    name = trial.user_attrs.get(FOLDER) or f"trial-{len(trials(study)):03d}"
    trial.set_user_attr(FOLDER, name)
    return trial, name


def _distribution(one: Range) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    if one.whole:
        return IntDistribution(int(one.low), int(one.high), log=one.by_ratio)
    return FloatDistribution(one.low, one.high, log=one.by_ratio)


def tell(study: Study, trial: Trial, state: str, value: float | None) -> None:
    """Tell Optuna how a trial ended. Only a complete trial has a value."""
    if state == COMPLETE:
        study.tell(trial, value)
    else:
        _close(study, trial.number, state)


def _close(study: Study, number: int, state: str) -> None:
    from optuna.trial import TrialState

    study.tell(number, state=TrialState[state])


def trials(study: Study) -> dict[str, FrozenTrial]:
    """The trial of every run directory; the last one, if a later call continued it."""
    found = study.get_trials(deepcopy=False)
    return {trial.user_attrs[FOLDER]: trial for trial in found if FOLDER in trial.user_attrs}


def values(params: dict[str, Any]) -> dict[str, Any]:
    """The values that a trial is trained with, rounded to a few digits."""
    return {
        name: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        for name, value in params.items()
    }


def importances(study: Study) -> dict[str, float]:
    """The share of the metric's variance that each setting explains; empty with too few trials."""
    import optuna

    complete = [trial for trial in trials(study).values() if trial.state.name == COMPLETE]
    if len(complete) < MIN_FOR_IMPORTANCES or len({trial.value for trial in complete}) < 2:
        return {}
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


# The trials of a sweep as rows, best first.


if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One trial. Bytes are those of all ranks."""

    trial: str
    state: str
    metric: float | None
    """The metric of the last validation, also if the trial did not finish."""

    values: dict[str, Any]
    steps: int
    bytes_sent: int
    ratio: float | None
    minutes: float


def results(folder: Path, metric: Metric, trials: dict[str, FrozenTrial]) -> list[Result]:
    """All trials in the order they began."""
    found = []
    for name, trial in sorted(trials.items()):
        run = row(read_runlog(folder / name))
        found.append(
            Result(
                trial=name,
                state=STATES.get(trial.state.name, "half-way"),
                metric=run.metrics.get(metric.name),
                values=values(trial.params),
                steps=run.steps,
                bytes_sent=run.bytes_sent,
                ratio=run.ratio,
                minutes=run.minutes,
            )
        )
    return found


def ranked(found: Iterable[Result], metric: Metric) -> list[Result]:
    """Finished trials by their metric, the best first, then the others."""
    sign = -1.0 if metric.higher_is_better else 1.0

    def rank(result: Result) -> tuple[bool, float]:
        value = float("inf") if result.metric is None else sign * result.metric
        return result.state != "finished", value

    return sorted(found, key=rank)


def best(found: Iterable[Result], metric: Metric) -> Result | None:
    """The finished trial with the best metric; None when none has finished."""
    first = next(iter(ranked(found, metric)), None)
    return first if first is not None and first.state == "finished" else None


def as_table(found: list[Result], metric: Metric) -> list[list[str]]:
    """Headings and cells."""
    names = list(dict.fromkeys(name for result in found for name in result.values))
    head = ["trial", "state", metric.label, *names, "steps", "sent", "ratio", "minutes"]
    return [head, *(_cells(result, names) for result in found)]


def _cells(result: Result, names: list[str]) -> list[str]:
    return [
        result.trial,
        result.state,
        "-" if result.metric is None else format_metric(result.metric),
        *(f"{result.values[name]:g}" if name in result.values else "-" for name in names),
        str(result.steps),
        format_bytes(result.bytes_sent),
        "-" if result.ratio is None else f"{result.ratio:.1f}",
        f"{result.minutes:.1f}",
    ]


def as_plain(found: list[Result]) -> list[dict[str, Any]]:
    """The results as plain values, for JSON."""
    return [asdict(result) for result in found]


# The report of a sweep: the importance of each setting, and the results of the trials.


AXIS_LIMIT = 3.0
"""Axes and colours end at this multiple of the first quartile of the metric, because a trial that
diverged would compress all others into a corner."""
COLOURS = {"finished": "#3b82d6", "pruned": "#e08214", "half-way": "#8c6bd1", "failed": "#d6554c"}
BEST, OTHERS = (59, 130, 214), (190, 190, 190)
"""RGB colours of the best and the worst lines, visible on dark and light pages."""


def importance(shares: dict[str, float]) -> list[Figure]:
    """The importance of each setting."""
    if not shares:
        return []
    names = sorted(shares, key=shares.__getitem__)
    bars = {"type": "bar", "orientation": "h", "x": rounded(shares[n] for n in names), "y": names}
    note = "The share of the metric's variance that a setting explains by itself (fANOVA)."
    return [Figure("What mattered", [bars], note, {"xaxis": {"tickformat": "~%"}})]


def history(found: list[Result], metric: Metric) -> list[Figure]:
    """The metric of every trial in order, and the best so far."""
    traces = _by_state([(i, result) for i, result in enumerate(found)])
    done = [(i, r.metric) for i, r in enumerate(found) if r.state == "finished"]
    known = [(i, value) for i, value in done if value is not None]
    if known:
        lowest = accumulate((value for _, value in known), max if metric.higher_is_better else min)
        line = {"shape": "hv", "color": "#2a9d6f"}
        best = {"type": "scatter", "mode": "lines", "name": "best so far", "line": line}
        traces.append(best | {"x": [i for i, _ in known], "y": rounded(lowest)})
    return _figure("Trials in order", traces, found, "trial", metric)


def slices(found: list[Result], space: dict[str, Range], metric: Metric) -> list[Figure]:
    """The metric against each setting alone."""
    figures = []
    for name, one in space.items():
        traces = _by_state([(result.values.get(name), result) for result in found])
        scale = LOG if one.by_ratio else {"type": "linear"}
        title = f"{metric.label} against {name}"
        figures += _figure(title, traces, found, name, metric, **scale)
    return figures


def parallel(found: list[Result], space: dict[str, Range], metric: Metric) -> list[Figure]:
    """Parallel coordinates: every trial is a line through its settings and its metric."""
    known = [(r, r.metric) for r in ranked(found, metric) if r.metric is not None]
    if len(known) < 2:
        return []
    low, high = min(value for _, value in known), _top(found)
    names = [f"{name}<br>{one.low:g} to {one.high:g}" for name, one in space.items()]
    names.append(f"{metric.label}<br>{low:.3g} to {high:.3g}")
    traces = []
    for result, value in reversed(known):  # the best is drawn last, above the others
        share = _share(min(value, high), low, high)
        y = [_position(one, result.values[name]) for name, one in space.items()]
        settings = [f"{name} {result.values[name]:g}" for name in space]
        text = "<br>".join([f"{result.trial}, {result.state}", *settings])
        text += f"<br>{metric.label} {format_metric(value)}"
        line = {"color": _between(share), "width": 3 - 2 * share}
        trace = {"type": "scatter", "mode": "lines+markers", "name": result.trial, "line": line}
        trace |= {"x": list(range(len(names))), "y": rounded([*y, share])}
        traces.append(trace | {"text": text, "hoverinfo": "text"})
    ticks = {"tickvals": list(range(len(names))), "ticktext": names, "zeroline": False}
    layout = {"xaxis": ticks, "yaxis": {"visible": False, "range": [-0.05, 1.05]}}
    layout |= {"hovermode": "closest", "showlegend": False}
    note = (
        "Each line is a trial. Every axis goes from the low end of its range at the bottom to the "
    )
    note += "high end; better trials are bluer and wider. Hover to see the values."
    return [Figure("Settings and result together", traces, note, layout)]


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.0


def _position(one: Range, value: float) -> float:
    """The position of a value in its range, from 0 to 1."""
    ends = (value, one.low, one.high)
    return _share(*(log(each) for each in ends)) if one.by_ratio else _share(*ends)


def _between(share: float) -> str:
    mixed = (round(a + share * (b - a)) for a, b in zip(BEST, OTHERS, strict=True))
    return f"rgb({','.join(map(str, mixed))})"


def cost(found: list[Result], metric: Metric) -> list[Figure]:
    """The metric of finished trials against the bytes that they sent."""
    finished = [result for result in found if result.state == "finished"]
    traces = _by_state([(result.bytes_sent, result) for result in finished])
    title = f"{metric.label} against bytes"
    axis = {"exponentformat": "SI"}
    return _figure(title, traces, finished, "bytes sent by all workers", metric, **axis)


def _by_state(placed: list[tuple[Any, Result]]) -> list[dict[str, Any]]:
    """Points of the trials that have an x value and a metric, one trace for each state."""
    shown = [(x, result) for x, result in placed if x is not None and result.metric is not None]
    traces = []
    for state, colour in COLOURS.items():
        own = [(x, result) for x, result in shown if result.state == state]
        if own:
            trace = {"type": "scatter", "mode": "markers", "name": state, "x": [x for x, _ in own]}
            trace |= {"y": rounded(result.metric for _, result in own)}
            trace |= {"text": [result.trial for _, result in own], "marker": {"color": colour}}
            traces.append(trace)
    return traces


def _figure(
    title: str,
    traces: list[dict[str, Any]],
    found: list[Result],
    x: str,
    metric: Metric,
    **axis: Any,
) -> list[Figure]:
    """A figure of the metric over `x`; empty if no trial has a metric."""
    if not traces:
        return []
    values = [result.metric for result in found if result.metric is not None]
    low, high = min(values), _top(found)
    layout: dict[str, Any] = {"hovermode": "closest", "xaxis": {"title": {"text": x}} | axis}
    y: dict[str, Any] = {"title": {"text": metric.label}}
    layout["yaxis"] = y
    above = sum(value > high for value in values)
    if not above:
        return [Figure(title, traces, "", layout)]
    margin = 0.05 * (high - low)
    y["range"] = rounded([low - margin, high + margin])
    note = f"{above} of {len(values)} trials are above {high:.3g} and not shown."
    return [Figure(title, traces, note, layout)]


def _top(found: list[Result]) -> float:
    """The value at which axes and colours end; see `AXIS_LIMIT`."""
    values = sorted(result.metric for result in found if result.metric is not None)
    quarter = values[(len(values) - 1) // 4]
    return min(values[-1], AXIS_LIMIT * quarter) if quarter > 0 else values[-1]


def write_report(
    path: Path,
    found: list[Result],
    space: dict[str, Range],
    metric: Metric,
    shares: dict[str, float],
    line: str,
) -> None:
    """Write the page; `line` is the command that trains with the best settings."""
    cells = as_table(ranked(found, metric), metric)
    few = "" if shares else paragraph("Too few trials have finished to say what mattered.")
    sections = [
        Section("Trials, best first", [table(cells[0], cells[1:]), few]),
        Section("What mattered", [*importance(shares), *parallel(found, space, metric)]),
        Section("Each setting alone", slices(found, space, metric)),
        Section("On the way", [*history(found, metric), *cost(found, metric)]),
    ]
    best = paragraph(f"The best so far: {line}") if line else paragraph("None has finished yet.")
    write_page(path, f"{path.parent.resolve().name}: search of settings", best, sections)
