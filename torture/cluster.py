# SPDX-License-Identifier: Apache-2.0
"""Faults of the network: every rank in a network namespace of its own, links that are cut.

The namespaces have no names and nothing of the machine is in them. One process holds a bridge and
the store; the ranks are its children, and all of it is gone when they are.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torture import ranks, world
from torture.processes import Child
from torture.ranks import Job
from torture.trial import Kind, SkippedError, Trial
from torture.verdicts import Finding

NEWUSER, NEWNET, PARENT_DEATH_SIGNAL = 0x10000000, 0x40000000, 1
STORE = "10.78.255.254"
BOUND = 60.0


@dataclass(frozen=True, slots=True)
class Cut:
    """What happens to the link of a rank after a step, and for how long; 0 is for good."""

    how: str
    rank: int
    step: int
    seconds: float = 0.0


def _call(function: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*args):
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


def _ip(command: str) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {command}: {done.stderr.strip()}")


def _enter() -> None:
    """A network namespace of this process, and where it is not root the user namespace it needs."""
    user, group = os.getuid(), os.getgid()
    if user:
        _call("unshare", NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("unshare", NEWNET)
    _ip("link set lo up")


def host(jobs: list[Job], cut: Cut) -> None:
    """The bridge, the store and the ranks; exit codes are left in a file."""
    folder = Path(jobs[0].folder)
    with open(folder / "host.log", "w", buffering=1) as said:
        os.dup2(said.fileno(), 2)
        _enter()
        _ip("link add bridge type bridge")
        _ip(f"address add {STORE}/16 dev bridge")
        _ip("link set bridge up")
        pids, go = {}, []
        for job in jobs:
            ready, theirs = os.pipe()
            mine, start = os.pipe()
            pids[job.rank] = _fork(job, mine, theirs)
            os.read(ready, 1)
            _ip(f"link add port{job.rank} type veth peer name eth0 netns {pids[job.rank]}")
            _ip(f"link set port{job.rank} master bridge up")
            go.append(start)
        store = dist.TCPStore(STORE, 0, None, True, wait_for_workers=False)
        for start in go:
            os.write(start, store.port.to_bytes(4, "little"))
        deadline = time.monotonic() + BOUND
        if _reached(folder, cut, deadline):
            CUTS[cut.how](cut, pids[cut.rank])
        codes = _wait(pids, deadline)
        (folder / "codes.json").write_text(json.dumps(codes))


def _fork(job: Job, mine: int, theirs: int) -> int:
    """A rank in a namespace of its own, which begins when it is told the port of the store."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _call("prctl", PARENT_DEATH_SIGNAL, signal.SIGKILL)
        _call("unshare", NEWNET)
        os.write(theirs, b".")
        port = int.from_bytes(os.read(mine, 4), "little")
        _ip("link set lo up")
        _ip(f"address add 10.78.0.{job.rank + 1}/16 dev eth0")
        _ip("link set eth0 up")
        ranks.main(replace(job, address=(STORE, port), device="eth0"))
        code = 0
    except BaseException:  # noqa: BLE001 - as a script would end
        traceback.print_exc()
    finally:
        os._exit(code)


def _reached(folder: Path, cut: Cut, deadline: float) -> bool:
    path = folder / f"rank-{cut.rank}.steps"
    while time.monotonic() < deadline:
        if path.exists() and len(path.read_text().splitlines()) >= cut.step:
            return True
        time.sleep(0.005)
    return False


def _unplug(cut: Cut, _: int) -> None:
    _ip(f"link set port{cut.rank} down")
    if cut.seconds:
        time.sleep(cut.seconds)
        _ip(f"link set port{cut.rank} up")


def _reset(cut: Cut, pid: int) -> None:
    """Abort every connection of the rank, as a firewall does."""
    space = ["nsenter", f"--net=/proc/{pid}/ns/net", "ss", "-K", "src", f"10.78.0.{cut.rank + 1}"]
    subprocess.run(space, capture_output=True, check=False)


CUTS: dict[str, Callable[[Cut, int], None]] = {"unplug": _unplug, "reset": _reset}


def _wait(pids: dict[int, int], deadline: float) -> dict[int, int | None]:
    codes: dict[int, int | None] = {}
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for rank, pid in pids.items():
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for rank in pids.keys() - codes.keys():
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    return {rank: codes.get(rank) for rank in pids}


def run(jobs: list[Job], cut: Cut) -> list[world.Ended]:
    missing = [tool for tool in ("ip", "nsenter", "ss") if shutil.which(tool) is None]
    if missing:
        raise SkippedError(f"{', '.join(missing)} not found (Debian: util-linux, iproute2)")
    folder = Path(jobs[0].folder)
    process = Child(host, jobs, cut)
    process.start()
    process.join(BOUND + 20)
    process.kill()
    path = folder / "codes.json"
    if not path.exists():
        why = (folder / "host.log").read_text()[-300:]
        raise SkippedError(f"no network namespaces here: {why}")
    codes: dict[str, Any] = json.loads(path.read_text())
    return [world.ended(folder, job.rank, codes[str(job.rank)]) for job in jobs]


def cutting(how: str, heals: bool) -> Kind:
    """A link is cut in the middle of a run: it heals in time, or the others name the rank."""

    def kind(trial: Trial) -> list[Finding]:
        jobs = trial.jobs(timeout=9.0, extra={"pause": 0.03})
        reference, victim = trial.reference(jobs), trial.victim(jobs)
        seconds = trial.rng.uniform(0.1, 1.2) if heals else 0.0
        cut = Cut(how, victim, trial.rng.randrange(1, 9), seconds)
        trial.what += f": {how} after step {cut.step} for {seconds:.2f} s"
        ends = run(jobs, cut)
        if heals:
            return world.finished_alike(ends, reference)
        if how == "reset":  # all live and lost a connection: no rank is to blame
            return world.failed_clearly(ends, -1, ("rank",)) or world.resumed(jobs, reference)
        # the rank that is cut off cannot know more than that nobody answers
        found = world.failed_clearly(ends, victim) + world.hangs([ends[victim]])
        return found or world.resumed(jobs, reference)

    return kind


KINDS: dict[str, Kind] = {
    "cut-link": cutting("unplug", heals=False),
    "cut-heals": cutting("unplug", heals=True),
    "reset": cutting("reset", heals=False),
}
