# SPDX-License-Identifier: Apache-2.0
"""Times on other networks: how long a training takes there, without training it there again.

A method takes the same steps, to the bit, on every network: only their time differs. So each run is
trained once, on the network that the machine has. A short run of the same settings then measures
what its steps take on another network, and every step of the training is given that time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from statistics import mean

import msgspec
import numpy as np

from oktopk.errors import RunError
from oktopk.lab.baselines import LOCAL
from oktopk.lab.runlog.reader import RunLog
from oktopk.lab.runlog.schema import STEP_PARTS, EndRecord, RunRecord, StepRecord, ValidationRecord
from oktopk.lab.tasks.base import AUTO
from oktopk.lab.train.config import LOCAL_STEPS, Config
from oktopk.launch import network as launch_network
from oktopk.stats import PHASES
from oktopk.utils.arguments import format_bytes

TIMING = "timing"
"""The folder of the short runs, below that of the comparison."""
DENSE_STEPS = 6
LEFT_OUT = 2
"""Steps of each kind that are not counted: they connect and allocate."""
ROUNDS = 6
"""Exchanges of a method with local steps."""
MOST_STEPS = 400
"""Of a short run, unless the steps that are left out and one more need more rounds."""
BY_THE_CLOCK = ("method", "density", "group_numel")
"""Settings that a run decides by the time that its steps take, if they are `auto`."""
FARTHEST = 2.0
"""How many times more than the most bytes that were timed a step may send."""


def check_networks(networks: list[str], base: Config, wanted: list[Config]) -> None:
    """Raise if a network is none, or cannot be made here, or would change the steps of a run."""
    if not networks:
        return
    for network in networks:
        launch_network.check_network(network)
    if base.network:
        raise ValueError("--networks and --network: give one of them")
    if base.max_minutes:
        raise ValueError(
            "--networks: the minutes of --max-minutes would be those of the training, not of the "
            "networks: give --max-minutes 0, and --max-steps or --epochs"
        )
    for run, name in product(wanted, BY_THE_CLOCK):
        if getattr(run, name) == AUTO:
            raise ValueError(
                f"--networks: {name} = {AUTO} is measured, so {run.name} would take other steps on "
                "every network: give a value"
            )
    if not launch_network.is_permitted():
        raise ValueError(f"--networks needs namespaces: {launch_network.why_not()}")
    for network in networks:
        launch_network.refuse_delay(network)


def folder_of(network: str) -> str:
    """The name of the folder, or a part of the name of a file, for a network."""
    return network.replace(":", "-")


def without_seed(name: str, seed: int) -> str:
    """The name of a run without the part that tells its seed."""
    return name.removesuffix(f"-s{seed}") if seed else name


def timing_run(run: Config, network: str) -> Config:
    """The short run that measures the steps of `run` on a network, the same for all seeds.

    It has a few dense steps, and then one period of exact thresholds, whatever the method is: all
    methods are timed with the same batches, since utterances and images may differ in size. Local
    steps take a few rounds, which may be more batches.
    """
    sparse = least = LEFT_OUT + run.exact_every
    if run.method in (LOCAL_STEPS, *LOCAL):
        rounds = max(ROUNDS, -(-sparse // run.every))
        sparse, least = rounds * run.every, (LEFT_OUT + 1) * run.every
    # while the density falls, steps send up to as much as dense ones: those are timed, too
    warmup = DENSE_STEPS
    if run.warmup_steps != AUTO and not run.ramp_steps:
        warmup = min(run.warmup_steps, DENSE_STEPS)
    return replace(
        run,
        name=without_seed(run.name, run.seed),
        seed=0,
        runs=str(Path(run.runs) / TIMING / folder_of(network)),
        network=network,
        until="",
        max_minutes=0.0,
        warmup_steps=warmup,
        ramp_steps=0,
        max_steps=max(min(warmup + sparse, MOST_STEPS), warmup + least),
        validate_steps=0,
        checkpoint_every=0,
        probe_every=0,
        samples=0,
    )


def seconds_by_bytes(timing: RunLog, part: str = "whole") -> tuple[list[float], list[float]]:
    """Bytes of the kinds of steps that a short run has, ascending, and their mean seconds.

    The kinds are dense, sparse, and, with local steps, those without an exchange. The steps of a
    baseline all have the phase dense, so its bytes tell those that send everything from the others.
    The seconds are those of whole steps, or of a part of them.
    """
    kinds: dict[tuple[str, bool, bool], list[StepRecord]] = defaultdict(list)
    for step in timing.steps:
        is_all = step.bytes_sent >= step.bytes_dense
        kinds[step.phase, step.bytes_sent > 0, is_all].append(step)
    points = [
        (mean(step.bytes_sent for step in steps), mean(getattr(s, part) or 0.0 for s in steps))
        for steps in (steps[LEFT_OUT:] or steps for steps in kinds.values())
    ]
    points.sort()
    return [x for x, _ in points], [y for _, y in points]


def on_network(runlog: RunLog, timing: RunLog, network: str) -> RunLog:
    """The run as it would have been recorded on the network of the short run.

    Steps whose bytes are between those of two kinds, while the density falls, take a time between
    those of the two. RunError if steps sent far more than any that was timed.
    """
    sent = [step.bytes_sent for step in runlog.steps]
    _check_range(runlog, timing, network)
    times = {
        part: np.interp(sent, *seconds_by_bytes(timing, part)).tolist()
        for part in ("whole", *STEP_PARTS)
    }
    steps = [
        msgspec.structs.replace(step, **{part: seconds[i] for part, seconds in times.items()})
        for i, step in enumerate(runlog.steps)
    ]
    until = dict(zip((step.step for step in steps), accumulate(times["whole"]), strict=True))
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


def _check_range(runlog: RunLog, timing: RunLog, network: str) -> None:
    """RunError if the run has steps of a kind that the short run did not have."""
    most, timed = (
        max((step.bytes_sent for step in log.steps), default=0) for log in (runlog, timing)
    )
    if most > FARTHEST * timed:
        raise RunError(
            f"{runlog.directory.name} has steps that sent {format_bytes(most)}, and its short run "
            f"at {network} has none above {format_bytes(timed)}: remove {timing.directory} to "
            "time it again"
        )


def _timed(end: EndRecord, steps: list[StepRecord]) -> EndRecord:
    """The end of a run whose steps took other times."""
    seconds = {phase: sum(s.whole or 0.0 for s in steps if s.phase == phase) for phase in PHASES}
    totals = {
        phase: msgspec.structs.replace(total, microseconds=round(1e6 * seconds[phase]))
        for phase, total in (end.totals or {}).items()
    }
    return msgspec.structs.replace(end, totals=totals)
