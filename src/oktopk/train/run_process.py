"""A training run as a process of its own: started, waited for, ended within bounds."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from oktopk.errors import RunError
from oktopk.launch.local_workers import AFTER_SIGNAL, LaunchError, find_place
from oktopk.launch.parent_watchdog import LINE, lifeline
from oktopk.train.config import (
    Config,
    as_flag,
    changes,
    load,
)
from oktopk.utils.signals import InterruptedBySignal

PATIENCE = AFTER_SIGNAL + 10.0
"""Seconds a run has to save and leave; its own workers have AFTER_SIGNAL of them."""
ALWAYS = ("runs", "name", "workers")
"""Flags that are always there: a launcher with one place would decide the last."""
NO_MATTER = (
    *("name", "runs", "timeout", "cache", "log_every", "probe_every", "histogram_every"),
    *("keep", "samples"),
)
"""Settings that may be another when a comparison or a sweep goes on: the training is the same."""
SHOWN_LINES = 12


def flags(config: Config, base: str) -> list[str]:
    """The flags of `oktopk train` that make this config of the one called `base`."""
    differing = changes(load(base), config)
    given = {name: getattr(config, name) for name in ALWAYS}
    given |= {name: new for name, (_, new) in differing.items()}
    return ["--config", base, *(word for pair in given.items() for word in as_flag(*pair))]


def command_line(config: Config, base: str) -> str:
    """The same for people."""
    return shlex.join(["oktopk", "train", *flags(config, base)])


@contextmanager
def started(config: Config, base: str, log: Path) -> Iterator[subprocess.Popen]:
    """`oktopk train --resume` with its output in a file; it ends with the block, whatever ends it.

    In a session of its own: Ctrl-C reaches this process, which passes it on once. It also ends when
    this process is killed.
    """
    command = [sys.executable, "-m", "oktopk", "train", *flags(config, base), "--resume"]
    with lifeline() as line:
        with log.open("ab") as said:
            process = subprocess.Popen(
                command,
                env={**os.environ, LINE: str(line)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[line],
                start_new_session=True,
            )
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen, patience: float = PATIENCE) -> None:
    """Ask it to save and leave, and kill it when it does not. Workers end with their starter."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        pass
    finally:  # Ctrl-C again while waiting: no more patience
        if process.poll() is None:
            process.kill()
            process.wait()


def tail(log: Path) -> str:
    """The last lines of what a run said."""
    lines = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    return "".join(f"  | {line}\n" for line in lines)


def answered(what: str, act: Callable[[], int]) -> int:
    """The exit code of a command that starts runs; its errors are told in one line."""
    _refuse_launchers(what)
    try:
        return act()
    except ValueError as error:
        sys.stderr.write(f"{what}: {error}\n")
        return 2
    except (RunError, OSError) as error:
        sys.stderr.write(f"{what}: {error}\n")
        return 1


def _refuse_launchers(what: str) -> None:
    """These commands start their runs one after the other, so they must be there once."""
    place = find_place()
    if place is not None and place.size > 1:
        raise LaunchError(
            f"{what} starts its workers itself, and this is {place}: start it once, without a "
            "launcher"
        )


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block like an error would, so that a run that was started is not left."""

    def leave(number: int, _: object) -> None:
        raise InterruptedBySignal(number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
