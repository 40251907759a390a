# SPDX-License-Identifier: Apache-2.0
"""Training runs in processes of their own, for commands that train several runs in turn."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from oktopk.errors import LaunchError, RunError
from oktopk.lab.runlog.reader import METRICS_FILE, RunLog, RunLogTail, read_runlog
from oktopk.lab.runlog.schema import Record
from oktopk.lab.train.config import USUAL, Config, changes
from oktopk.lab.train.config_files import as_flag, load
from oktopk.launch.child_process import parent_pipe, start_child, stop_children
from oktopk.launch.ranks import read_rank_environment
from oktopk.launch.workers import AFTER_SIGNAL_SECONDS
from oktopk.utils.files import FileError

SECONDS_TO_SAVE = AFTER_SIGNAL_SECONDS + 10.0
"""Seconds that a run has to save and exit; its workers have AFTER_SIGNAL_SECONDS of them."""
POLL_SECONDS = 0.5
ALWAYS_GIVEN = ("runs", "name", "workers")
"""Flags that are always given. Without --workers, a launcher with one rank would set it."""
IRRELEVANT_SETTINGS = (
    *("name", "runs", "timeout", "cache", "log_every", "probe_every", "histogram_every"),
    *("keep", "samples"),
)
"""Settings that may change when a comparison or a sweep continues: the training is the same."""
SHOWN_LINES = 12

ShouldStop = Callable[[list[Record]], bool]
"""Takes the records that are new, and says whether the run is to be ended."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How the process of a run ended, and what the run recorded."""

    exit_code: int | None
    """None if the run was ended early."""

    runlog: RunLog


def flags(config: Config, base: str) -> list[str]:
    """The flags of `oktopk train` that turn the config called `base` into this one.

    Without a `base` it is the default config of the task.
    """
    differing = changes(load(base, config.task), config)
    given = {name: getattr(config, name) for name in ALWAYS_GIVEN}
    given |= {name: getattr(config, name) for name in USUAL.get(config.method, ())}
    given |= {name: new for name, (_, new) in differing.items()}
    first = ["--config", base] if base else ["--task", config.task]
    return [*first, *(word for pair in given.items() for word in as_flag(*pair))]


def command_line(config: Config, base: str) -> str:
    """The command that trains this config, as a user would type it."""
    return shlex.join(["oktopk", "train", *flags(config, base)])


def directory_of(config: Config) -> Path:
    """The directory that a run in a comparison or a sweep has."""
    return Path(config.runs) / config.name


def log_of(config: Config) -> Path:
    """The file with the output of a run."""
    return Path(config.runs) / f"{config.name}.log"


def train_in_process(config: Config, base: str, should_stop: ShouldStop | None = None) -> RunResult:
    """Run `oktopk train --resume` until it ends, or until `should_stop`; it saves before it exits.

    `base` is the name of the config that `config` differs from.
    """
    with started(config, base, log_of(config)) as process:
        code = process.wait() if should_stop is None else _watch(process, config, should_stop)
    return RunResult(code, read_runlog(directory_of(config)))


def _watch(process: subprocess.Popen[bytes], config: Config, should_stop: ShouldStop) -> int | None:
    tail = RunLogTail(directory_of(config) / METRICS_FILE)
    while True:
        code = process.poll()  # before the records are read: nothing is written after the end
        stop = should_stop(tail.read()[1])
        if code is not None or stop:
            return code
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)


@contextmanager
def started(config: Config, base: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start `oktopk train --resume` with its output in a file, and end it with the block.

    The process has a session of its own, so that Ctrl-C reaches only this process, which passes it
    on once. The parent watchdog ends it when this process is killed.
    """
    command = [sys.executable, "-m", "oktopk", "train", *flags(config, base), "--resume"]
    with parent_pipe() as pipe:
        with log.open("ab") as output:
            process = start_child(command, pipe, stdout=output, stderr=output)
        try:
            yield process
        finally:
            stop_children([process], SECONDS_TO_SAVE)


def last_lines(log: Path) -> str:
    """The end of the output of a run, indented."""
    lines = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    return "".join(f"  | {line}\n" for line in lines)


def exit_code_of(what: str, act: Callable[[], int]) -> int:
    """Run a command that starts runs, and print its errors in one line. Returns the exit code."""
    _refuse_launchers()
    try:
        return act()
    except (RunError, FileError, OSError) as error:
        sys.stderr.write(f"{what}: {error}\n")
        return 1
    except ValueError as error:
        sys.stderr.write(f"{what}: {error}\n")
        return 2


def _refuse_launchers() -> None:
    """Raise if a launcher started this command on several ranks: it starts workers itself."""
    env = read_rank_environment()
    if env is not None and env.world_size > 1:
        raise LaunchError(
            f"this command starts its workers itself, and this is {env}: start it once, without "
            "a launcher"
        )
