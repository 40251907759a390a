# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a small run, wait for them within a bound, and judge how they ended."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torture import ranks
from torture.processes import Child
from torture.ranks import Job, Plant
from torture.verdicts import Finding

BOUND = 45.0
"""Seconds after which a run of a few steps, whose time-out is 6 s, has hung."""
# DDP's own collective in its second forward: the library is not asked, and cannot name anybody
OF_TORCH = "self.reducer._rebuild_buckets()"
ABORTED = re.compile(r"EnforceNotMet|terminate called|Fatal Python error|Segmentation fault")


@dataclass(slots=True)
class Ended:
    """How one rank ended: its exit code, None when it had to be killed, and what it left."""

    code: int | None
    said: str
    notes: dict[str, list[dict[str, Any]]]

    @property
    def message(self) -> str:
        """The error that ended it, without the traceback above."""
        found = list(re.finditer(r"^[\w.]*(?:Error|Exception|Interrupt)\b", self.said, re.M))
        return self.said[found[-1].start() :] if found else ""

    @property
    def weights(self) -> str:
        """The bits after the last step."""
        return self.notes["steps"][-1]["weights"] if self.notes["steps"] else ""


Meanwhile = Callable[[list[Child], float], None]


def run(jobs: list[Job], meanwhile: Meanwhile | None = None, bound: float = BOUND) -> list[Ended]:
    """Run all ranks; `meanwhile(processes, deadline)` may do something to them."""
    folder = Path(jobs[0].folder)
    for path in folder.glob("rank-*"):
        path.unlink()
    # the store lives here, as it does in a launcher
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    jobs = [replace(job, address=("127.0.0.1", store.port)) for job in jobs]
    processes = [Child(ranks.main, job) for job in jobs]
    deadline = time.monotonic() + bound
    try:
        for process in processes:
            process.start()
        if meanwhile is not None:
            meanwhile(processes, deadline)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [ended(folder, job.rank, code) for job, code in zip(jobs, codes, strict=True)]


def ended(folder: Path, rank: int, code: int | None) -> Ended:
    def lines(name: str) -> list[dict[str, Any]]:
        path = folder / f"rank-{rank}.{name}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    log = folder / f"rank-{rank}.log"
    said = log.read_text(errors="replace") if log.exists() else ""
    return Ended(code, said, {name: lines(name) for name in ("steps", "odd", "planted", "end")})


def jobs_of(folder: Path, size: int, attached: dict[str, Any], **more: Any) -> list[Job]:
    folder.mkdir(parents=True, exist_ok=True)
    return [
        Job(rank, size, str(folder), ("127.0.0.1", 0), attached, **more) for rank in range(size)
    ]


def with_plant(jobs: list[Job], rank: int, plant: Plant, **more: Any) -> list[Job]:
    """The same jobs, but one rank has something planted or differs in its settings."""
    return [
        replace(job, plants=(*job.plants, plant), **more) if job.rank == rank else job
        for job in jobs
    ]


def when_stopped(process: Child, deadline: float) -> bool:
    """Wait until a process has stopped; False when it ended or did not."""
    while time.monotonic() < deadline and process.exitcode is None:
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
        except FileNotFoundError:  # it ended in this moment
            return False
        if stat.rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def newest_save(folder: Path, size: int) -> int:
    """The last step that every rank has a file of; 0 when there is none."""
    found = {path.name.rsplit(".", 1)[0] for path in folder.glob("step-*-rank-*.pt")}
    steps = {int(name.split("-")[1]) for name in found}
    whole = [s for s in steps if all(f"step-{s}-rank-{rank}" in found for rank in range(size))]
    return max(whole, default=0)


def hangs(ends: list[Ended], without: int = -1) -> list[Finding]:
    return [
        Finding("hang", f"rank {rank} was still there after {BOUND:g} s: {one.said[-300:]}")
        for rank, one in enumerate(ends)
        if one.code is None and rank != without
    ]


def aborts(ends: list[Ended]) -> list[Finding]:
    """A process that was not ended by us and ended by a signal, or says what C++ says."""
    return [
        Finding("unclear", f"rank {rank} aborted ({one.code}): {one.said[-600:]}")
        for rank, one in enumerate(ends)
        if one.code in (-signal.SIGABRT, -signal.SIGSEGV) or ABORTED.search(one.said)
    ]


def failed_clearly(ends: list[Ended], victim: int, names: tuple[str, ...] = ()) -> list[Finding]:
    """Every rank but the victim ended with an error that names the victim and nobody else.

    With `names` the message must have one of these instead.
    """
    found = hangs(ends, victim) + aborts(ends)
    for rank, one in enumerate(ends):
        if rank == victim or one.code is None:
            continue
        if one.code == 0:
            found.append(Finding("difference", f"rank {rank} ended as if nothing had happened"))
            continue
        if OF_TORCH in one.said:
            continue
        message = re.sub(rf"rank {rank}, step \d+:", "", one.message)
        if names:
            right = any(name in message for name in names)
        else:
            blamed = set(re.findall(r"[Rr]ank (\d+) (?:does not answer|failed|died)", message))
            right = re.search(rf"[Rr]anks? \[?{victim}\b", message) and blamed <= {str(victim)}
        if not right:
            wanted = " or ".join(names) or f"rank {victim}"
            text = one.message or one.said[-300:] or "nothing"
            found.append(Finding("unclear", f"rank {rank} does not name {wanted}: {text[:600]}"))
    return found


def unfinished(ends: list[Ended]) -> list[Finding]:
    """Every rank that hung, aborted or ended with an error where none was expected."""
    found = hangs(ends) + aborts(ends)
    for rank, one in enumerate(ends):
        if one.code:
            text = one.message or one.said[-600:]
            found.append(Finding("lost", f"rank {rank} did not finish ({one.code}): {text[:600]}"))
    return found


def finished_alike(ends: list[Ended], reference: list[Ended]) -> list[Finding]:
    """Every rank finished, and all have the bits of the run without a fault.

    A reference that did not finish has no bits to compare with, so that is found instead.
    """
    found = unfinished(ends) or unfinished(reference)
    for rank, (one, other) in enumerate(zip(ends, reference, strict=True)):
        if one.code == other.code == 0 and one.weights != other.weights:
            text = f"rank {rank} ended with other weights, {first_difference(one, other)}"
            found.append(Finding("difference", text))
    return found


def first_difference(one: Ended, other: Ended) -> str:
    """After which step two runs of a rank no longer had the same weights."""
    known = {entry["step"]: entry["weights"] for entry in other.notes["steps"]}
    steps = [entry for entry in one.notes["steps"] if entry["step"] in known]
    differing = [entry["step"] for entry in steps if entry["weights"] != known[entry["step"]]]
    return f"from step {differing[0]} on" if differing else "though no step differs"


def resumed(jobs: list[Job], reference: list[Ended]) -> list[Finding]:
    """Start again from the last whole checkpoint: it must end with the bits of the reference."""
    folder, size = Path(jobs[0].folder), len(jobs)
    for path in folder.glob("rank-*"):
        path.rename(folder / f"first-{path.name}")
    step = newest_save(folder, size)
    again = run([replace(job, plants=(), resume_from=step) for job in jobs])
    return finished_alike(again, reference)
