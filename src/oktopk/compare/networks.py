# SPDX-License-Identifier: Apache-2.0
"""Times on other networks: how long a training takes there, without training it there again.

A method takes the same steps, to the bit, on every network: only their time differs. So each run is
trained once, on the network that the machine has. A short run of the same settings then measures
what its steps take on another network, and every step of the training is given that time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import mean

import msgspec
import numpy as np

from oktopk.baselines.names import LOCAL
from oktopk.launch import network as launch_network
from oktopk.runlog.reader import RunLog
from oktopk.runlog.schema import EndRecord, RunRecord, StepRecord, ValidationRecord
from oktopk.stats import PHASES
from oktopk.train.config import LOCAL_STEPS, Config

TIMING = "timing"
"""The folder of the short runs, below that of the comparison."""
DENSE_STEPS = 6
LEFT_OUT = 2
"""Steps of each kind that are not counted: they connect, compile and allocate."""
ROUNDS = 6
"""Exchanges of a method with local steps."""
MOST_STEPS = 400


def check_networks(networks: list[str]) -> None:
    """Raise if a network is none, or cannot be made on this machine."""
    for network in networks:
        launch_network.check_network(network)
    if networks and not launch_network.is_permitted():
        raise ValueError(f"--networks needs namespaces: {launch_network.why_not()}")


def folder_of(network: str) -> str:
    """The name of the folder, or a part of the name of a file, for a network."""
    return network.replace(":", "-")


def timing_run(run: Config, network: str) -> Config:
    """The short run that measures the steps of `run` on a network.

    It has a few dense steps, and one period of exact thresholds or a few rounds of local steps.
    """
    if run.method in (LOCAL_STEPS, *LOCAL):
        sparse = ROUNDS * run.every
    else:
        sparse = LEFT_OUT + run.exact_every
    warmup = min(run.warmup_steps, DENSE_STEPS)
    return replace(
        run,
        runs=str(Path(run.runs) / TIMING / folder_of(network)),
        network=network,
        until="",
        max_minutes=0.0,
        warmup_steps=warmup,
        ramp_steps=0,
        max_steps=min(warmup + sparse, MOST_STEPS),
        validate_steps=0,
        checkpoint_every=0,
        probe_every=0,
        samples=0,
    )


def seconds_by_bytes(timing: RunLog) -> tuple[list[float], list[float]]:
    """Bytes of the kinds of steps that a short run has, ascending, and their mean seconds.

    The kinds are dense, sparse, and, with local steps, those without an exchange.
    """
    kinds: dict[tuple[str, bool], list[StepRecord]] = defaultdict(list)
    for step in timing.steps:
        kinds[step.phase, step.bytes_sent > 0].append(step)
    points = [
        (mean(step.bytes_sent for step in steps), mean(step.whole or 0.0 for step in steps))
        for steps in (steps[LEFT_OUT:] or steps for steps in kinds.values())
    ]
    points.sort()
    return [x for x, _ in points], [y for _, y in points]


def on_network(runlog: RunLog, timing: RunLog, network: str) -> RunLog:
    """The run as it would have been recorded on the network of the short run.

    Steps whose bytes are between those of two kinds, while the density falls, take a time between
    those of the two.
    """
    times = np.interp([step.bytes_sent for step in runlog.steps], *seconds_by_bytes(timing))
    steps = [
        msgspec.structs.replace(step, whole=float(seconds))
        for step, seconds in zip(runlog.steps, times, strict=True)
    ]
    until = dict(zip((step.step for step in steps), accumulate(times.tolist()), strict=True))
    copied = RunLog(runlog.directory, runlog.config, dict(runlog.records), runlog.problems)
    copied.records[StepRecord] = list(steps)
    copied.records[ValidationRecord] = [
        msgspec.structs.replace(record, seconds=until.get(record.step))
        for record in runlog.validations
    ]
    copied.records[RunRecord] = [msgspec.structs.replace(runlog.info, network=network)]
    if runlog.end is not None and runlog.end.totals:
        copied.records[EndRecord] = [_timed(runlog.end, steps)]
    return copied


def _timed(end: EndRecord, steps: list[StepRecord]) -> EndRecord:
    """The end of a run whose steps took other times."""
    seconds = {phase: sum(s.whole or 0.0 for s in steps if s.phase == phase) for phase in PHASES}
    totals = {
        phase: msgspec.structs.replace(total, microseconds=round(1e6 * seconds[phase]))
        for phase, total in (end.totals or {}).items()
    }
    return msgspec.structs.replace(end, totals=totals)
