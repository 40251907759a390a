# SPDX-License-Identifier: Apache-2.0
"""Local workers: start the ranks of a job on this machine, and wait until the last has ended.

Rank 0 writes to the terminal. The output of the other ranks goes to files. When ranks fail, the
output of the rank that failed first by itself is shown, and one line of each of the others.
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
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import torch.distributed as dist

from oktopk.errors import LaunchError
from oktopk.launch.child_process import parent_pipe, start_child, stop_children
from oktopk.launch.ranks import RankEnvironment
from oktopk.utils.signals import record_signals, signal_name

AFTER_FAILURE_SECONDS = 10.0
"""Time for the other ranks to report which rank they miss."""
AFTER_SIGNAL_SECONDS = 30.0
"""Time for the workers to save and exit, as SLURM and Kubernetes give."""
STOP_SECONDS = 3.0
"""Time between SIGTERM and SIGKILL for workers that are late even then."""
RELAY_SECONDS = 2.0
"""Time to copy the rest of rank 0's stderr, which a process started by it may keep open."""
POLL_SECONDS = 0.02
SHOWN_LINES = 30
# What a rank reports when another rank has failed.
NETWORK_ERRORS = ("ExchangeError", "Connection closed by peer", "Connection reset", "Broken pipe")


def num_workers_to_start(env: RankEnvironment | None, asked: int | None, default: int) -> int:
    """Return how many workers a command must start; 0 if this process itself does the work."""
    if asked is not None and asked < 1:
        raise LaunchError(f"--workers {asked}: at least 1")
    if env is None:
        number = asked or default
        return number if number > 1 else 0
    if asked is None or asked == env.world_size:
        return 0
    if env.world_size == 1:
        return asked
    raise LaunchError(
        f"--workers {asked}, but this is {env}: leave --workers out, the launcher decides"
    )


def run_local_workers(
    workers: int,
    argv: list[str],
    *,
    address: str = "127.0.0.1",
    prefix: Callable[[int], list[str]] = lambda rank: [],
) -> int:
    """Run `python -m oktopk ARGV...` as `workers` local ranks; return the exit code of the job.

    The ranks use a store in this process, at a port that the system chose, so jobs cannot collide.
    When a rank fails, the others get AFTER_FAILURE_SECONDS. SIGINT and SIGTERM are passed on to the
    workers as SIGTERM, which Python does not answer with a traceback; a second signal kills them.
    The workers end when this process has ended. For workers in network namespaces, `address` is
    where they reach this process, and `prefix` returns what goes before the command of a rank.
    """
    store = dist.TCPStore(address, 0, None, True, wait_for_workers=False)
    command = [sys.executable, "-m", "oktopk", *argv]
    with (
        tempfile.TemporaryDirectory() as folder,
        record_signals() as received,
        parent_pipe() as pipe,
    ):
        outputs = [Path(folder, str(rank)) for rank in range(workers)]
        processes: list[subprocess.Popen[bytes]] = []
        relay = Thread(target=lambda: _relay(processes[0], outputs[0]), daemon=True)
        try:
            for rank in range(workers):
                if received:
                    break
                variables = _worker_variables(rank, workers, address, store.port)
                words = [*prefix(rank), *command]
                processes.append(_start_worker(rank, words, variables, outputs[rank], pipe))
            if processes:
                relay.start()
            codes = _wait(processes, received)
        finally:
            stop_children(processes, STOP_SECONDS)
        if processes:
            relay.join(RELAY_SECONDS)
        return _exit_code(received, codes, len(processes), outputs)


def _worker_variables(rank: int, world_size: int, address: str, port: int) -> dict[str, str]:
    """Return the environment variables that make a process a worker."""
    return {
        "OKTOPK_RANK": str(rank),
        "OKTOPK_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _start_worker(
    rank: int, command: list[str], variables: dict[str, str], output: Path, pipe: int
) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return start_child(
            command,
            pipe,
            stdout=None if rank == 0 else file,
            stderr=subprocess.PIPE if rank == 0 else subprocess.STDOUT,
            variables=variables,
        )


def _relay(process: subprocess.Popen[bytes], output: Path) -> None:
    """Copy what rank 0 writes to stderr to this process's stderr and to a file, as it comes."""
    assert process.stderr is not None
    with process.stderr as stream, output.open("ab", buffering=0) as file:
        while chunk := os.read(stream.fileno(), 2**16):
            file.write(chunk)
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()


def _wait(processes: list[subprocess.Popen[bytes]], received: list[int]) -> dict[int, int]:
    """Wait for the workers, and pass the first signal on to them.

    Returns exit codes by rank, in the order in which they ended. Those that run at the deadline,
    which a failure or a signal sets, are not among them.
    """
    codes: dict[int, int] = {}
    deadline, passed_on = float("inf"), False
    while len(codes) < len(processes) and time.monotonic() < deadline and len(received) < 2:
        for rank, process in enumerate(processes):
            if rank not in codes and process.poll() is not None:
                codes[rank] = process.returncode
        if received and not passed_on:
            passed_on = True
            for process in processes:
                process.terminate()
        if deadline == float("inf") and (passed_on or any(codes.values())):
            seconds = AFTER_SIGNAL_SECONDS if passed_on else AFTER_FAILURE_SECONDS
            deadline = time.monotonic() + seconds
        time.sleep(POLL_SECONDS)
    return codes


def _exit_code(
    received: list[int], codes: dict[int, int], num_started: int, outputs: list[Path]
) -> int:
    """Return the exit code of the job: of a signal, or of the rank that failed; write why."""
    sys.stdout.flush()
    if received:
        sys.stderr.write(_interrupted(received, num_started))
        return 128 + received[0]
    failed = {rank: code for rank, code in codes.items() if code}
    if not failed:
        return 0
    cause = _first_cause(failed, outputs)
    sys.stderr.write(_failure_text(failed, cause, outputs))
    return failed[cause] if failed[cause] > 0 else 128 - failed[cause]


def _first_cause(failed: dict[int, int], outputs: list[Path]) -> int:
    """Return the rank that failed by itself: it was killed, or its error is not of the network."""
    killed = [rank for rank, code in failed.items() if code < 0]
    by_itself = [
        rank
        for rank in failed
        if not any(text in _last_line(outputs[rank]) for text in NETWORK_ERRORS)
    ]
    return [*killed, *by_itself, *failed][0]


def _failure_text(failed: dict[int, int], cause: int, outputs: list[Path]) -> str:
    """Describe a failure. Rank 0 has written to the terminal already; no line is shown twice."""
    code, shown = failed[cause], {_last_line(outputs[0]), ""}
    how = f"ended with exit code {code}" if code > 0 else f"was killed by {_killer(-code)}"
    lines = []
    if _last_line(outputs[cause]) not in shown:
        text = outputs[cause].read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        lines += [f"rank {cause} | {line}" for line in text]
        shown.add(_last_line(outputs[cause]))
    for rank in failed:
        if _last_line(outputs[rank]) not in shown:
            lines.append(f"rank {rank} | {_last_line(outputs[rank])}")
    return "\n".join([*lines, f"oktopk: rank {cause} of {len(outputs)} {how}"]) + "\n"


def _last_line(output: Path) -> str:
    """Return the last line that is not a warning of torch, without torch's prefix `[rank1]: `."""
    lines = output.read_text(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line and not line.startswith("[W")), "")
    return re.sub(r"^\[rank\d+\]: ", "", last)


def _interrupted(received: list[int], num_started: int) -> str:
    """Describe in one line which signals ended the job."""
    line = f"oktopk: interrupted by {signal_name(received[0])}"
    if not num_started:
        return f"{line} before a worker had started\n"
    if len(received) > 1:
        return f"{line}, then by {signal_name(received[1])}; the workers were ended at once\n"
    return f"{line}; the workers were asked to save and leave\n"


def _killer(number: int) -> str:
    name = signal_name(number)
    return f"{name}: out of memory?" if number == signal.SIGKILL else name
