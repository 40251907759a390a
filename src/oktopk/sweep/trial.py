"""One trial: a training run that is looked at while it goes on, and ended when it is hopeless."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from oktopk.runlog.reader import (
    CHECKPOINTS,
    JOURNAL,
    Entry,
    read,
)
from oktopk.runlog.tail import Follower
from oktopk.sweep.study import COMPLETE, FAILED, PRUNED
from oktopk.train.config import Config
from oktopk.train.run_process import started

LOOK_SECONDS = 0.5
Report = Callable[[int, float], bool]
"""Takes a step and the metric there; whether the trial is hopeless."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended; without a state it was left half-way, for a later call."""

    state: str | None
    value: float | None = None
    text: str = ""


def run_trial(config: Config, base: str, metric: str, report: Report, deadline: float) -> Outcome:
    """Train, and end it early when `report` says so, or the time is up (it saves before)."""
    folder = Path(config.runs) / config.name
    if not read(folder).finished:  # else only its result had not been taken down
        with started(config, base, log_of(config)) as process:
            follower, told = Follower(folder / JOURNAL), set[int]()
            running = True
            while running:
                running = process.poll() is None  # asked first: nothing is written after the end
                if _hopeless(follower.read()[1], metric, report, told) and running:
                    break
                if running and time.monotonic() > deadline:
                    return Outcome(None)
                time.sleep(LOOK_SECONDS if running else 0)
        if running:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)  # nobody will go on with it
            return Outcome(PRUNED)
        if process.returncode:
            return Outcome(FAILED, text=f"exit code {process.returncode}")
    record = read(folder)
    found = record.validated[-1].get(metric) if record.validated else None
    if found is None:
        return Outcome(FAILED, text=f"the run ended without a {metric}")
    return Outcome(COMPLETE, found)


def log_of(config: Config) -> Path:
    """Where a trial's output goes."""
    return Path(config.runs) / f"{config.name}.log"


def _hopeless(entries: list[Entry], metric: str, report: Report, told: set[int]) -> bool:
    """Report validations that are new; the first one says too little to end a trial by."""
    hopeless = False
    for entry in entries:
        if entry["kind"] != "epoch" or entry.get(metric) is None or entry["step"] in told:
            continue
        told.add(entry["step"])
        hopeless = report(entry["step"], entry[metric]) and len(told) > 1
    return hopeless
