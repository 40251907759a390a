# SPDX-License-Identifier: Apache-2.0
"""The search, by Optuna, which stores its trials in the folder of the sweep.

A trial belongs to a run directory. When a sweep is interrupted, its last trial cannot be continued
in Optuna. The next call adds a second trial with the same values and the same directory, where the
training resumes from its checkpoint.
"""

# Optuna is imported inside functions, because the rest of the command line does not need it
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oktopk.sweep.space import Range
from oktopk.train.config import Config
from oktopk.utils.files import error_summary, file_error

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
