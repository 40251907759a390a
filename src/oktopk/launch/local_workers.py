"""Start workers on this machine, and stay with them until the last has ended.

Rank 0 has the terminal. What the others say is kept, and shown when they fail: the first that
failed in full, the rest in one line each.
"""

# pyright: reportPrivateImportUsage=false
# torch documents its stores, but does not list them as exported

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import FrameType

import torch.distributed as dist

from oktopk.errors import LaunchError
from oktopk.launch.parent_watchdog import LINE, lifeline
from oktopk.launch.process_group import joined
from oktopk.launch.rank_environment import Place, find_place
from oktopk.utils.signals import STOPS, name_of

__all__ = ["LaunchError", "Place", "find_place", "joined", "start_workers", "workers_to_start"]

AFTER_DEATH = 10.0
"""Seconds for the living to say whom they miss."""
AFTER_SIGNAL = 30.0
"""Seconds to save and leave, as SLURM and Kubernetes give."""
RELAY_SECONDS = 2.0
"""A grandchild may hold rank 0's stderr open for ever."""
SHOWN_LINES = 30
# What a rank says when it was another that failed.
VICTIMS = ("ExchangeError", "Connection closed by peer", "Connection reset", "Broken pipe")


def workers_to_start(place: Place | None, asked: int | None, default: int) -> int:
    """How many workers a command must start; 0 if this process itself is to do the work."""
    if asked is not None and asked < 1:
        raise LaunchError(f"--workers {asked}: at least 1")
    if place is None:
        number = asked or default
        return number if number > 1 else 0
    if asked is None or asked == place.size:
        return 0
    if place.size == 1:
        return asked
    raise LaunchError(
        f"--workers {asked}, but this is {place}: leave --workers out, the launcher decides"
    )


def start_workers(
    workers: int,
    argv: list[str],
    *,
    address: str = "127.0.0.1",
    prefix: Callable[[int], list[str]] = lambda rank: [],
) -> int:
    """Run `python -m oktopk ARGV...` as `workers` local ranks; the exit code of the job.

    `address` is where they reach this process, `prefix` goes before the command of a rank: for
    workers in network namespaces.

    The ranks meet at a store of this process on a port the system chose, so jobs cannot collide.
    When a rank fails the others have AFTER_DEATH seconds. SIGINT and SIGTERM reach the workers as
    SIGTERM, which no Python answers with a traceback; a second signal kills them. Workers end when
    this process is gone.
    """
    store = dist.TCPStore(address, 0, None, True, wait_for_workers=False)
    command = [sys.executable, "-m", "oktopk", *argv]
    with tempfile.TemporaryDirectory() as folder, _signals() as received, lifeline() as line:
        said = [Path(folder, str(rank)) for rank in range(workers)]
        processes: list[subprocess.Popen] = []
        relay = Thread(target=lambda: _relay(processes[0], said[0]), daemon=True)
        try:
            for rank in range(workers):
                if received:
                    break
                env = _worker_environment(rank, workers, (address, store.port), line)
                processes.append(_start(rank, [*prefix(rank), *command], env, said[rank], line))
            if processes:
                relay.start()
            ended = _watch(processes, received)
        finally:
            _end([process for process in processes if process.poll() is None])
        if processes:
            relay.join(RELAY_SECONDS)
        if received:
            sys.stdout.flush()
            sys.stderr.write(_interrupted(received, len(processes)))
            return 128 + received[0]
        failed = {rank: code for rank, code in ended.items() if code}
        if not failed:
            return 0
        cause = _cause(failed, said)
        sys.stdout.flush()
        sys.stderr.write(_report(failed, cause, workers, said))
        return failed[cause] if failed[cause] > 0 else 128 - failed[cause]


def _worker_environment(rank: int, size: int, store: tuple[str, int], line: int) -> dict[str, str]:
    return {
        **os.environ,
        "OKTOPK_RANK": str(rank),
        "OKTOPK_SIZE": str(size),
        LINE: str(line),
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _start(
    rank: int, command: list[str], env: dict[str, str], said: Path, line: int
) -> subprocess.Popen:
    with said.open("wb") as kept:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else kept,
            stderr=subprocess.PIPE if rank == 0 else subprocess.STDOUT,
            pass_fds=[line],
            start_new_session=True,  # Ctrl-C reaches this process, which passes it on once
        )


def _relay(process: subprocess.Popen, said: Path) -> None:
    """Show what rank 0 says on stderr as it comes, and keep it."""
    assert process.stderr is not None
    with process.stderr as pipe, said.open("ab", buffering=0) as kept:
        while chunk := os.read(pipe.fileno(), 2**16):
            kept.write(chunk)
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()


def _watch(processes: list[subprocess.Popen], received: list[int]) -> dict[int, int]:
    """Exit codes by rank, in the order they ended; without those still running at the deadline."""
    ended: dict[int, int] = {}
    deadline, passed_on = float("inf"), 0
    while len(ended) < len(processes) and time.monotonic() < deadline and len(received) < 2:
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended[rank] = process.returncode
        for _ in received[passed_on:1]:
            passed_on += 1
            for process in processes:
                process.terminate()
        if deadline == float("inf") and (passed_on or any(ended.values())):
            deadline = time.monotonic() + (AFTER_SIGNAL if passed_on else AFTER_DEATH)
        time.sleep(0.02)
    return ended


def _end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + 3
    for process in processes:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _cause(failed: dict[int, int], said: list[Path]) -> int:
    """The rank that failed by itself: one that was killed, or says more than whom it misses."""
    killed = [rank for rank, code in failed.items() if code < 0]
    by_itself = [rank for rank in failed if not any(word in _last(said[rank]) for word in VICTIMS)]
    return [*killed, *by_itself, *failed][0]


def _report(failed: dict[int, int], cause: int, workers: int, said: list[Path]) -> str:
    """What happened, once: rank 0 has been heard already, and the same words are not repeated."""
    code, heard = failed[cause], {_last(said[0]), ""}
    how = f"ended with exit code {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
    lines = []
    if _last(said[cause]) not in heard:
        text = said[cause].read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        lines += [f"rank {cause} | {line}" for line in text]
        heard.add(_last(said[cause]))
    for rank in failed:
        if _last(said[rank]) not in heard:
            lines.append(f"rank {rank} | {_last(said[rank])}")
    return "\n".join([*lines, f"oktopk: rank {cause} of {workers} {how}"]) + "\n"


def _last(said: Path) -> str:
    """The last line that is no warning of torch's, without the rank that torch puts before it."""
    lines = said.read_text(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line and not line.startswith("[W")), "")
    return re.sub(r"^\[rank\d+\]: ", "", last)


def _interrupted(received: list[int], started: int) -> str:
    """One line about the signals that ended the job."""
    line = f"oktopk: interrupted by {name_of(received[0])}"
    if not started:
        return f"{line} before a worker had started\n"
    if len(received) > 1:
        return f"{line}, then by {name_of(received[1])}; the workers were ended at once\n"
    return f"{line}; the workers were asked to save and leave\n"


def _signal_name(number: int) -> str:
    name = name_of(number)
    return f"{name}: out of memory?" if number == signal.SIGKILL else name


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals to pass on that came meanwhile."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in STOPS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
