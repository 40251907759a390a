# SPDX-License-Identifier: Apache-2.0
"""Faults of real runs: `oktopk train`, with its own launcher, with torchrun, by hand."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torture.runs import (
    BOUND,
    MOMENTS,
    ORPHANS,
    TRAIN,
    Done,
    finish,
    flags,
    none_left,
    plain_words,
    reference,
    resumed,
    same_end,
    started,
    wait_for,
    worker,
)
from torture.trial import Kind, SkippedError, Trial
from torture.verdicts import Finding


def hit(whom: str, *numbers: signal.Signals) -> Kind:
    """A rank or the launcher gets a signal at some moment; afterwards the run is resumed."""

    def kind(trial: Trial) -> list[Finding]:
        reference(trial)
        runs, number = trial.folder / "runs", trial.rng.choice(numbers)
        # A rank that stops when all the others have ended is waited for: nobody knows better. And
        # nothing can be done about a rank that is interrupted while Python imports torch.
        not_tried = {
            signal.SIGSTOP: "shutdown",
            signal.SIGINT: "start-up" if whom == "rank" else "",
        }
        moments = [name for name in MOMENTS if name != not_tried.get(number)]
        moment, victim = trial.rng.choice(moments), trial.rng.randrange(2)
        trial.what = f"{number.name} to {whom} {victim if whom == 'rank' else ''} in {moment}"
        command = [*TRAIN, *flags(trial, runs, "--workers", "2")]
        with started(trial, command) as (process, end):
            worker(process, "OKTOPK_RANK=0")  # now the launcher has begun
            wait_for(trial, process, runs / "tiny", moment)
            pid = process.pid if whom == "launcher" else worker(process, f"OKTOPK_RANK={victim}")
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            done = end(BOUND)
        killed = whom == "launcher" and number == signal.SIGKILL
        found = none_left(trial, ORPHANS if killed else 5.0)
        if whom == "launcher" or number in (signal.SIGTERM, signal.SIGINT):
            found += plain_words(done)
        else:
            found += plain_words(done, f"rank {victim}", f"ranks [{victim}]")
        return found or resumed(trial, command, runs / "tiny")

    return kind


def stopped_launcher(trial: Trial) -> list[Finding]:
    """The launcher stops for a while: nothing comes of it."""
    runs, moment = trial.folder / "runs", trial.rng.choice(list(MOMENTS))
    trial.what = f"the launcher stops for 2 s in {moment}"
    with started(trial, [*TRAIN, *flags(trial, runs, "--workers", "2")]) as (process, end):
        wait_for(trial, process, runs / "tiny", moment)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(2)
            os.kill(process.pid, signal.SIGCONT)
        done = end(BOUND)
    return none_left(trial) + plain_words(done) + same_end(trial, done, runs / "tiny")


def restarted(trial: Trial) -> list[Finding]:
    """torchrun starts the workers again after one was killed: the same bits."""
    runs, moment = trial.folder / "runs", trial.rng.choice(list(MOMENTS)[:-1])
    trial.what = f"rank killed under torchrun in {moment}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    torchrun += ["2", "--max-restarts", "2", "--monitor-interval", "0.2", "-m", "oktopk", "train"]
    with started(trial, [*torchrun, *flags(trial, runs, "--resume")]) as (process, end):
        wait_for(trial, process, runs / "tiny", moment)
        pid = worker(process, f"LOCAL_RANK={trial.rng.randrange(2)}")
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        done = end(2 * BOUND)
    return none_left(trial) + same_end(trial, done, runs / "tiny")


def damaged(trial: Trial) -> list[Finding]:
    """The newest checkpoint of a run that was killed is damaged: the one before it is taken."""
    reference(trial)
    runs = trial.folder / "runs"
    folder, command = runs / "tiny", [*TRAIN, *flags(trial, runs, "--workers", "2")]
    with started(trial, command) as (process, _):
        deadline = time.monotonic() + BOUND
        while process.poll() is None and time.monotonic() < deadline:
            if len(list(folder.glob("checkpoints/*/complete.json"))) >= 2:
                break
            time.sleep(0.002)
    left = none_left(trial, ORPHANS)
    newest = max(folder.glob("checkpoints/*/complete.json")).parent
    name = trial.rng.choice(("common.pt", "rank-0.pt", "rank-1.pt", "complete.json"))
    how = trial.rng.choice(list(DAMAGES))
    trial.what = f"{newest.name}/{name}: {how}"
    DAMAGES[how](newest / name, trial.rng.random())
    again = finish(trial, [*command, "--resume"], "second.log")
    words = plain_words(again)
    # also right: a folder that is not what its name says, settings that are gone
    refusal = how in ("renamed", "config.toml emptied") and bool(again.code)
    told = how == "the journal cut" and "metrics.jsonl is damaged" in again.said
    return left + words + ([] if refusal else same_end(trial, again, folder, all_steps=not told))


def _cut(path: Path, at: float) -> None:
    path.write_bytes(path.read_bytes()[: int(at * path.stat().st_size)])


def _flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 255
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, float], Any]] = {
    "cut": _cut,
    "flipped": _flip,
    "deleted": lambda path, at: path.unlink(),
    "emptied": lambda path, at: path.write_bytes(b""),
    "a folder": lambda path, at: (path.unlink(), path.mkdir()),
    "renamed": lambda path, at: path.parent.rename(path.parent.with_name("step-00000099")),
    "config.toml emptied": lambda path, at: (path.parents[2] / "config.toml").write_text(""),
    "the journal cut": lambda path, at: _cut(path.parents[2] / "metrics.jsonl", at),
}


def on_mount(trial: Trial, before: str, after: str, given: list[str]) -> tuple[Done, Done]:
    """Run, change the mount, and resume, in a mount namespace of its own; the runs are copied."""
    runs, command = trial.folder / "runs", shlex.join([*TRAIN, *given])
    lines = [before, _noted(command, "first"), after, _noted(command, "second")]
    script = "\n".join([*lines, f"cp -r {runs} kept"])
    runs.mkdir()
    unshare = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]
    if shutil.which("unshare") is None or _fails(unshare):
        raise SkippedError("mounting needs root")
    finish(trial, ["unshare", "--mount", "sh", "-ec", script], "script.log", 2 * BOUND)
    ends = []
    for name in ("first", "second"):
        code, said = (trial.folder / f"{name}.{end}" for end in ("code", "log"))
        known = int(code.read_text()) if code.exists() else None
        ends.append(Done(known, said.read_text(errors="replace") if said.exists() else ""))
    return ends[0], ends[1]


def _fails(command: list[str]) -> bool:
    return bool(subprocess.run(command, capture_output=True, check=False).returncode)


def _noted(command: str, name: str) -> str:
    """The command in a script that ends with the first error, with its exit code in a file."""
    run = f"code=0; {command} --resume > {name}.log 2>&1 || code=$?"
    return f"{run}; echo $code > {name}.code"


def full_disk(trial: Trial) -> list[Finding]:
    """The disk of the run is full at some moment; with more room it goes on."""
    reference(trial)
    runs, kilobytes = trial.folder / "runs", int(2 ** trial.rng.uniform(4, 12))
    trial.what = f"a disk of {kilobytes} KB"
    given = flags(trial, runs, "--workers", "2")
    mount = f"mount -t tmpfs -o size={kilobytes}k none {runs}"
    first, second = on_mount(trial, mount, f"mount -o remount,size=99m {runs}", given)
    found = none_left(trial) + plain_words(first, "No space left", "space")
    return found + plain_words(second) + same_end(trial, second, trial.folder / "kept" / "tiny")


def read_only(trial: Trial) -> list[Finding]:
    """A folder of the run cannot be written to; when it can, the run goes on."""
    reference(trial)
    runs = trial.folder / "runs"
    below = trial.rng.choice((".", "tiny", "tiny/checkpoints"))
    trial.what = f"{below} is read-only"
    place = shlex.quote(str(runs / below))
    mount = f"mkdir -p {place}; mount --bind {place} {place}; mount -o remount,ro,bind {place}"
    given = flags(trial, runs, "--workers", "2")
    first, second = on_mount(trial, mount, f"umount {place}", given)
    found = none_left(trial) + plain_words(first, "Read-only", "read-only")
    if first.code == 0:
        found.append(Finding("lost", "it ended as if everything had been written"))
    return found + plain_words(second) + same_end(trial, second, trial.folder / "kept" / "tiny")


DIFFERING = shlex.split(
    "density=0.3 warmup-steps=5 epochs=3 batch=3 hidden=16 seed=5 checkpoint-every=3 method=topka "
    "lr=0.02 accumulate=2 validate-every=2 max-steps=7 layers=1 optimizer=sgd wire=fp16 name=other"
)


def by_hand(trial: Trial, more: dict[int, list[str]]) -> dict[int, Done]:
    """Ranks as a launcher of the user's own would start them; each with flags of its own."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = str(door.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with contextlib.ExitStack() as stack:
        ends = {}
        for rank, words in more.items():
            env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
            command = [*TRAIN, *flags(trial, trial.folder / "runs"), *words]
            begun = started(trial, command, f"rank-{rank}.log", **env)
            ends[rank] = stack.enter_context(begun)[1]
        deadline = time.monotonic() + BOUND
        return {rank: end(max(0.0, deadline - time.monotonic())) for rank, end in ends.items()}


def other_flags(trial: Trial) -> list[Finding]:
    """One rank was started with another flag: all end, and say which."""
    victim, (name, value) = trial.rng.randrange(2), trial.rng.choice(DIFFERING).split("=")
    trial.what = f"rank {victim} has --{name} {value}"
    ends = by_hand(trial, {rank: [f"--{name}", value] * (rank == victim) for rank in range(2)})
    found = none_left(trial)
    for rank, done in ends.items():
        found += plain_words(done, name, name.replace("-", "_"), what=f"rank {rank}")
    if any(done.code == 0 for done in ends.values()):
        found.append(Finding("difference", "the run went on with different flags"))
    return found


def missing_rank(trial: Trial) -> list[Finding]:
    """One rank was never started: the other one names it."""
    here = trial.rng.randrange(2)
    trial.what = f"only rank {here} of 2 was started"
    done = by_hand(trial, {here: []})[here]
    found = none_left(trial) + plain_words(done, f"rank {1 - here}", f"ranks [{1 - here}]")
    return found + ([Finding("difference", "it went on alone")] if done.code == 0 else [])


KINDS: dict[str, Kind] = {
    "run-kill-rank": hit("rank", signal.SIGKILL),
    "run-stop-rank": hit("rank", signal.SIGSTOP),
    "run-terminate-rank": hit("rank", signal.SIGTERM, signal.SIGINT),
    "run-kill-launcher": hit("launcher", signal.SIGKILL),
    "run-terminate-launcher": hit("launcher", signal.SIGTERM, signal.SIGINT),
    "run-stop-launcher": stopped_launcher,
    "run-restart": restarted,
    "run-damaged": damaged,
    "run-full-disk": full_disk,
    "run-read-only": read_only,
    "run-flags": other_flags,
    "run-missing-rank": missing_rank,
}
