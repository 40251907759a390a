# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping child processes: local workers, and the runs of `compare` and `sweep`."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from oktopk.launch.parent_watchdog import PIPE_VARIABLE

Output = IO[bytes] | int | None
"""Where a stream of a child goes: a file, `subprocess.PIPE`, or None for the stream of this one."""


def start_child(
    command: Sequence[str],
    pipe: int,
    *,
    stdout: Output,
    stderr: Output,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that ends when this one has ended, by the pipe of `parent_pipe`.

    `variables` are added to its environment. It has a session of its own: Ctrl-C in a terminal
    reaches only this process, which decides what its children get.
    """
    return subprocess.Popen(
        command,
        env={**os.environ, **(variables or {}), PIPE_VARIABLE: str(pipe)},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=[pipe],
        start_new_session=True,
    )


def stop_children(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Send SIGTERM to children that still run, and kill those that run after `seconds` more.

    Children of a child end with it, by their own parent watchdog.
    """
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.terminate()
    deadline = time.monotonic() + seconds
    try:
        for child in running:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0, deadline - time.monotonic()))
    finally:  # also if another Ctrl-C interrupts the wait
        for child in running:
            if child.poll() is None:
                child.kill()
                child.wait()
