# SPDX-License-Identifier: Apache-2.0
"""Processes that start with everything imported, for several threads of the harness at a time."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.005


@cache
def forkserver() -> Any:
    """A context whose processes start with everything imported and every kernel compiled."""
    here = str(Path(__file__).parents[1])
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here not in known:  # the server does not inherit sys.path, only the environment
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, known)])
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torture.preloaded"])
    return context


class Child:
    """A process of the fork server.

    Whenever multiprocessing starts a process it also asks for the exit codes of all others. An exit
    code can be read once from the server. When two threads ask for the same one at the same time,
    one of them gets 255 instead, and a rank that finished seems to have failed. So only one thread
    at a time uses multiprocessing, and none waits inside of it.
    """

    _lock = threading.Lock()

    def __init__(self, target: Callable[..., None], *args: Any, daemon: bool = False) -> None:
        self._process = forkserver().Process(target=target, args=args, daemon=daemon)

    @property
    def pid(self) -> int | None:
        """None before `start`."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """None while the process lives."""
        with self._lock:
            return self._process.exitcode

    def start(self) -> None:
        with self._lock:
            self._process.start()

    def join(self, seconds: float) -> None:
        """Wait until the process has ended, but no longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while self.exitcode is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """End the process, if it has been started, and wait for its end."""
        if self.pid is None:
            return
        with self._lock:
            self._process.kill()
        self.join(10.0)
