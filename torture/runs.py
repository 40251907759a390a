# SPDX-License-Identifier: Apache-2.0
"""`oktopk train` on a tiny spoken corpus: start it, wait for a moment, judge its end."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from torture.ranks import digest
from torture.trial import Trial
from torture.verdicts import Finding
from torture.world import ABORTED

BOUND = 75.0

ORPHANS = 40.0
"""Seconds that workers have to save and leave when their launcher was killed."""

MARK = "OKTOPK_TORTURE"

TRAIN = [sys.executable, "-m", "oktopk", "train"]

TINY = shlex.split(
    "--hidden 8 --layers 2 --bidirectional --channels 2 --batch 2 --optimizer adamw --lr 0.01 "
    "--density 0.1 --warmup-steps 3 --validate-batch 3 --validate-every 1 --log-every 1 "
    "--ramp-steps 2 --timeout 8 --checkpoint-every 2 --epochs 2"
)

STEPS = 12  # 26 utterances, 2 ranks with batches of 2, 2 epochs

OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "OMPI", "PMI", "SLURM")


@dataclass(slots=True)
class Done:
    """How a command ended: its exit code, None when it had to be killed, and all it said."""

    code: int | None
    said: str


def corpus(trial: Trial) -> str:
    """A spoken corpus, made once."""
    folder = trial.folder.parent / "corpus"
    with trial.lock:
        if not folder.exists():
            speak = [sys.executable, "-m", "oktopk", "data", "speak", "--out", f"{folder}-"]
            speak += ["--train", "26", "--test", "7", "--seed", "3"]
            subprocess.run(speak, check=True, capture_output=True, timeout=BOUND)
            Path(f"{folder}-").rename(folder)
    return str(folder)


def flags(trial: Trial, runs: Path, *more: str) -> list[str]:
    return [*TINY, "--data", corpus(trial), "--runs", str(runs), "--name", "tiny", *more]


def environment(trial: Trial, **more: str) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith((*OF_LAUNCHERS, "OKTOPK"))}
    return kept | {MARK: str(trial.folder)} | more


def left_behind(trial: Trial) -> list[int]:
    """Processes of this trial that are still there."""
    found, mark = [], f"{MARK}={trial.folder}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def started(
    trial: Trial, command: list[str], log: str = "first.log", **env: str
) -> Iterator[tuple[subprocess.Popen, Callable[[float], Done]]]:
    """A command, and a function that waits for its end within a bound; nothing is left of it."""
    path = trial.folder / log
    with path.open("wb") as said:
        process = subprocess.Popen(
            command,
            env=environment(trial, **env),
            cwd=trial.folder,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )

    def end(bound: float) -> Done:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(bound)
        return Done(process.poll(), path.read_text(errors="replace"))

    try:
        yield process, end
    finally:
        process.kill()
        process.wait()


def finish(trial: Trial, command: list[str], log: str, bound: float = BOUND, **env: str) -> Done:
    with started(trial, command, log, **env) as (_, end):
        return end(bound)


def steps_in(folder: Path) -> list[int]:
    """The steps in the journal, as far as it was written."""
    found = []
    with contextlib.suppress(OSError):
        for line in (folder / "metrics.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                found += [entry["step"]] if entry.get("kind") == "step" else []
    return found


def saving(folder: Path) -> bool:
    """Whether a checkpoint is being written now."""
    paths = list(folder.glob("checkpoints/step-*"))
    return any(not (path / "complete.json").exists() for path in paths)


MOMENTS: dict[str, tuple[Callable[[Path], bool], float]] = {
    "start-up": (lambda folder: True, 6.0),
    "dense": (lambda folder: len(steps_in(folder)) >= 1, 0.1),
    "sparse": (lambda folder: len(steps_in(folder)) >= 4, 0.2),
    "checkpoint": (saving, 0.01),
    "validation": (lambda folder: len(steps_in(folder)) >= STEPS // 2, 0.2),
    "shutdown": (lambda folder: len(steps_in(folder)) >= STEPS, 1.5),
}
"""When something happens: what must be seen in the folder, and up to how long after."""


def wait_for(trial: Trial, process: subprocess.Popen, folder: Path, moment: str) -> None:
    seen, after = MOMENTS[moment]
    deadline = time.monotonic() + BOUND
    while process.poll() is None and time.monotonic() < deadline and not seen(folder):
        time.sleep(0.002)
    time.sleep(trial.rng.uniform(0, after))


def worker(process: subprocess.Popen, variable: str) -> int | None:
    """The child of a launcher that has this in its environment; None when it is gone."""
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            for pid in children.split():
                if variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return int(pid)
        time.sleep(0.02)
    return None


def weights(folder: Path) -> str:
    """The bits of the model in the newest checkpoint; one that a trial has damaged is none."""
    own = [path for path in folder.glob("checkpoints/step-*") if _says_its_step(path)]
    if not own:
        return ""
    return digest(torch.load(max(own) / "common.pt", weights_only=True)["model"])


def _says_its_step(folder: Path) -> bool:
    """Whether the manifest can be read and has the step of the folder's name."""
    try:
        step = json.loads((folder / "complete.json").read_bytes())["step"]
    except (OSError, ValueError):  # missing, a folder, cut, or overwritten
        return False
    return folder.name == f"step-{step:08d}"


def reference(trial: Trial) -> str:
    """The bits of the run that nothing happens to."""
    runs = trial.folder.parent / "reference-runs"
    given = flags(trial, runs, "--workers", "2")
    with trial.lock:
        if not runs.exists():
            done = finish(trial, [*TRAIN, *given], "reference.log")
            assert done.code == 0, done.said
            assert steps_in(runs / "tiny") == list(range(STEPS)), steps_in(runs / "tiny")
    return weights(runs / "tiny")


def plain_words(done: Done, *names: str, what: str = "the command") -> list[Finding]:
    """It ended, without a traceback, and said one of these names."""
    if done.code is None:
        return [Finding("hang", f"{what} was still there after {BOUND:g} s: {done.said[-400:]}")]
    if "Traceback (most recent" in done.said or ABORTED.search(done.said):
        return [Finding("unclear", f"{what} ended with a traceback: {done.said[-1200:]}")]
    if done.code and names and not any(name in done.said for name in names):
        wanted = " or ".join(names)
        return [Finding("unclear", f"{what} does not say {wanted}: {done.said[-600:]}")]
    return []


def same_end(trial: Trial, done: Done, folder: Path, *, all_steps: bool = True) -> list[Finding]:
    """It finished with the bits of the reference, and no step is missing from the journal."""
    if done.code is None:
        return [Finding("hang", f"the run did not end: {done.said[-400:]}")]
    if done.code:
        return [Finding("lost", f"it did not finish ({done.code}): {done.said[-900:]}")]
    if weights(folder) != reference(trial):
        return [Finding("difference", "it ended with other weights than the reference")]
    if all_steps and steps_in(folder) != list(range(STEPS)):
        return [Finding("lost", f"the steps in the journal are {steps_in(folder)}")]
    return []


def none_left(trial: Trial, bound: float = 5.0) -> list[Finding]:
    deadline = time.monotonic() + bound
    while (left := left_behind(trial)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [Finding("hang", f"processes {left} were left behind")] if left else []


def resumed(trial: Trial, command: list[str], folder: Path) -> list[Finding]:
    again = finish(trial, [*command, "--resume"], "second.log")
    return plain_words(again) + same_end(trial, again, folder)
