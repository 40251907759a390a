# SPDX-License-Identifier: Apache-2.0
"""One trial of a sweep: a training run that is ended early when it is not promising."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

from oktopk.compare.progress import RunProgress
from oktopk.runlog.reader import read_runlog
from oktopk.runlog.run_directory import CHECKPOINT_FOLDER
from oktopk.runlog.schema import Record, ValidationRecord
from oktopk.sweep.study import COMPLETE, FAILED, PRUNED
from oktopk.train.config import Config
from oktopk.train.run_process import directory_of, train_in_process

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
