# SPDX-License-Identifier: Apache-2.0
"""A training run small enough for a test, in ranks of a world or from the command line."""

from __future__ import annotations

import json
import math
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import TorchTransport
from oktopk.errors import RunError
from oktopk.lab.report.report import report
from oktopk.lab.tasks.speech.task import Speech
from oktopk.lab.train import checkpoint, loop
from oktopk.lab.train.config import make_config
from oktopk.lab.train.run import run_training
from oktopk.launch.ranks import RankEnvironment
from oktopk.utils.files import FileError

TINY = {
    "hidden": 8,
    "layers": 2,
    "bidirectional": True,
    "channels": 2,
    "batch": 2,
    "optimizer": "adamw",
    "lr": 0.01,
    "density": 0.1,
    "wire": "bf16",
    "warmup_steps": 2,
    "ramp_steps": 0,
    "validate_batch": 3,
    "log_every": 2,
    "timeout": 20.0,
}


SMALL = [
    item
    for name, value in (TINY | {"bidirectional": None}).items()
    for item in (f"--{name.replace('_', '-')}", *([] if value is None else [str(value)]))
]
"""The same as flags."""


class InterruptedRunError(Exception):
    """The run was broken off by the test."""


def train(
    group,
    corpus: str,
    runs: str,
    settings: dict,
    resume: bool,
    faults: dict | None = None,
    given: list[str] | None = None,
):
    """One rank's run. Faults: see `faulty`.

    `given` are the settings that were flags: all, unless others are named.
    """
    del group
    rank, size = dist.get_rank(), dist.get_world_size()
    config = make_config(**(TINY | {"name": "tiny", "data": corpus, "runs": runs} | settings))
    place = RankEnvironment("test", rank, size, rank, size)
    with faulty(rank, runs, **(faults or {})):
        try:
            # as if all settings were flags
            answer = run_training(
                config,
                torch.device("cpu"),
                place,
                resume,
                list(settings) if given is None else given,
                report,
            )
        except InterruptedRunError:
            return None
        except (RunError, FileError) as error:
            return f"{type(error).__name__}: {error}"
    folder, result, totals = answer
    return str(folder), result, totals.state()


@contextmanager
def faulty(
    rank: int,
    runs: str,
    breaks_at: int = -1,
    nan_at: tuple[int, int, int] = (-1, 0, 0),
    fills_at: int = -1,
    drifts_at: int = -1,
    no_files_at: int = -1,
):
    """Steps that break off; have a loss that is not a number (rank, first step, last step); find
    the disk full; after which a weight of rank 1 differs; from which rank 0 can write nothing."""
    take_step, loss_of, at = loop.take_step, Speech.loss, [0]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def breaking(run, batches):
        at[0] = run.progress.step
        if at[0] == breaks_at:
            raise InterruptedRunError
        if at[0] == fills_at and rank == 0:
            room = os.statvfs(runs)
            Path(runs, "ballast").write_bytes(bytes(room.f_bavail * room.f_bsize - 100_000))
        if at[0] == no_files_at and rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        entry = take_step(run, batches)
        if at[0] == drifts_at and rank == 1:
            with torch.no_grad():
                next(run.model.parameters()).view(-1)[0] += 1e-6
        return entry

    def poisoned(*args):
        bad = rank == nan_at[0] and nan_at[1] <= at[0] <= nan_at[2]
        return loss_of(*args) * (math.nan if bad else 1.0)

    loop.take_step, Speech.loss = breaking, poisoned
    try:
        yield
    finally:
        loop.take_step, Speech.loss = take_step, loss_of
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def entries(folder: str | Path, kind: str) -> list[dict]:
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def timeless(entry: dict) -> dict:
    """An entry without what differs from run to run: seconds and memory."""
    clocks = {"select", "exchange", "scatter", "exposed", "data", "forward", "backward"}
    return {
        key: value
        for key, value in entry.items()
        if key not in clocks | {"optimizer", "whole", "seconds", "memory"}
    }


def newest(folder: str | Path) -> Path:
    return max((Path(folder) / "checkpoints").glob("step-*"))


def found(group, folder: str) -> str:
    """The checkpoint a resumed run would take."""
    del group
    comm = Comm(TorchTransport())
    return str(checkpoint.find(Path(folder) / "checkpoints", comm, torch.device("cpu")))


class Poison:
    """What a pickle can do when it is loaded without care."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def load_poisoned(group, folder: str) -> str:
    """The error of loading a complete checkpoint that has code in it."""
    del group
    comm, device = Comm(TorchTransport()), torch.device("cpu")
    contents = {checkpoint.rank_file(comm.rank): {"x": Poison(f"{folder}/ran")}}
    if comm.rank == 0:
        contents[checkpoint.COMMON] = {}
    path = checkpoint.save(Path(folder), 1, contents, comm, device)
    assert checkpoint.find(Path(folder), comm, device) == path
    try:
        checkpoint.load(path, comm)
    except FileError as error:
        return str(error)
    return "loaded"
