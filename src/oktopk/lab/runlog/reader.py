# SPDX-License-Identifier: Apache-2.0
"""A run directory, and everything that is recorded in it, also while the run goes on."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, TypeVar, cast

import msgspec

from oktopk.errors import RunError
from oktopk.lab.runlog.schema import (
    RECORD_TYPES,
    EndRecord,
    EpochRecord,
    KnownConfig,
    MetricInfo,
    Record,
    RunRecord,
    StepRecord,
    UnknownRecord,
    ValidationRecord,
)
from oktopk.utils.arguments import list_some
from oktopk.utils.files import FileError, convert, parse_toml, read_text

# The directory of a run: NAME, NAME-2, NAME-3, ... in the folder of all runs.
#
# A new run gets a new directory, a resumed run finds its own, and a lock keeps a second process
# from writing to it.


METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.toml"
CHECKPOINT_FOLDER = "checkpoints"


def has_checkpoint(directory: Path) -> bool:
    """Whether a run can be resumed from a checkpoint."""
    return any(directory.glob(f"{CHECKPOINT_FOLDER}/step-*/complete.json"))


def run_directory(runs: Path, name: str, number: int) -> Path:
    """The directory with that number; the first one has no number in its name."""
    return runs / (name if number <= 1 else f"{name}-{number}")


def latest_number(runs: Path, name: str) -> int:
    """The highest number of a directory with that name; 0 when there is none."""
    return max(_numbers(runs, name), default=0)


def latest_resumable(runs: Path, name: str) -> int:
    """The highest number of a directory that has a checkpoint; 0 when there is none."""
    numbers = _numbers(runs, name)
    return max((n for n in numbers if has_checkpoint(run_directory(runs, name, n))), default=0)


def _numbers(runs: Path, name: str) -> list[int]:
    found = []
    for path in runs.iterdir() if runs.is_dir() else ():
        match = re.fullmatch(re.escape(name) + r"(?:-([2-9]|[1-9][0-9]{1,8}))?", path.name)
        if match and path.is_dir():
            found.append(int(match[1] or 1))
    return found


def create_run_directory(runs: Path, name: str, resume: bool) -> int:
    """Create the directory of a run and return its number.

    To resume, it is the latest directory that has a checkpoint, or else the latest. A new run gets
    a directory that did not exist.
    """
    last = latest_number(runs, name)
    number = max(1, (latest_resumable(runs, name) or last) if resume else last + 1)
    while True:
        try:
            run_directory(runs, name, number).mkdir(parents=True, exist_ok=resume)
        except FileExistsError:  # another run was faster
            number += 1
        else:
            return number


def check_writable(runs: Path) -> None:
    """Raise if no directory can be created in `runs`. Nothing is left behind."""
    place = next(path for path in (runs, *runs.parents) if path.exists())
    try:
        TemporaryDirectory(dir=place).cleanup()
    except OSError as error:
        raise RunError(
            f"no folder can be made in {runs} ({error.strerror}): give another --runs"
        ) from error


def lock(directory: Path) -> IO[str]:
    """Keep other processes from writing to the directory for as long as the file is open."""
    file = (directory / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise RunError(f"another run is writing to {directory}: wait for it or end it") from error
    return file


# `RunLog`: everything that is recorded in a run directory, however the run ended.


MAX_LINE_BYTES = 64 * 2**20
"""A longer line is read in pieces, so that one without end does not fill the memory."""
MAX_LISTED = 5
"""Damaged lines that are listed by number."""

R = TypeVar("R", bound=Record)


@dataclass(slots=True)
class RunLog:
    """The records of a run by type, each in the order in which they were written."""

    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    """The settings in `config.toml`; empty when there are none, as with other programs."""

    records: dict[type, list[Record]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Sentences about what could not be read."""

    def add(self, *records: Record) -> None:
        for record in records:
            self.records.setdefault(type(record), []).append(record)

    def of(self, kind: type[R]) -> list[R]:
        """All records of one type; empty when there are none."""
        return cast("list[R]", self.records.get(kind, []))

    @property
    def steps(self) -> list[StepRecord]:
        return self.of(StepRecord)

    @property
    def epochs(self) -> list[EpochRecord]:
        return self.of(EpochRecord)

    @property
    def validations(self) -> list[ValidationRecord]:
        return self.of(ValidationRecord)

    @property
    def metrics(self) -> list[MetricInfo]:
        """The metrics of the task, the most important first.

        A run of another program may not say which it has: then those that it recorded.
        """
        if self.info.task is not None:
            return self.info.task.metrics
        names = dict.fromkeys(name for record in self.validations for name in record.metrics)
        return [MetricInfo(name, name) for name in names]

    @property
    def info(self) -> RunRecord:
        """What was known when the run began or was last resumed; without values if it never did."""
        runs = self.of(RunRecord)
        return runs[-1] if runs else RunRecord(step=0)

    @property
    def end(self) -> EndRecord | None:
        """How the run ended; None while it is running, or when it was killed."""
        ends = self.of(EndRecord)
        return ends[-1] if ends else None

    @property
    def finished(self) -> bool:
        return self.end is not None and self.end.how == "finished"


def read_runlog(directory: Path) -> RunLog:
    """Read a run directory. What is missing or damaged is listed in `problems`."""
    runlog = RunLog(directory)
    config, metrics = directory / CONFIG_FILE, directory / METRICS_FILE
    if config.exists():
        try:
            values = parse_toml(read_text(config), CONFIG_FILE)
            convert(values, KnownConfig, CONFIG_FILE)
            runlog.config = values
        except FileError as error:
            runlog.problems.append(f"{CONFIG_FILE} could not be read: {error}")
    try:
        with metrics.open("rb") as file:
            _add_lines(runlog, _lines(file))
    except FileNotFoundError:
        runlog.problems.append(f"There is no {METRICS_FILE} in {directory}.")
    except OSError as error:
        runlog.problems.append(f"{METRICS_FILE} could not be read: {error}")
    return runlog


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES):
        yield line


def _add_lines(runlog: RunLog, lines: Iterable[bytes]) -> None:
    damaged = []
    for number, line in enumerate(lines, 1):
        record = parse(line)
        if record is None:
            damaged.append(number)
        elif not isinstance(record, UnknownRecord):
            runlog.add(record)
    if damaged:
        noun, verb = ("line", "was") if len(damaged) == 1 else ("lines", "were")
        numbers = list_some(damaged, MAX_LISTED)
        runlog.problems.append(
            f"{METRICS_FILE}: {noun} {numbers} could not be read and {verb} skipped"
        )


def parse(line: bytes) -> Record | UnknownRecord | None:
    """The record in one line; None when it is damaged, or was cut off when the run was killed.

    NaN and Infinity, which some programs write though JSON does not have them, are read as null.
    """
    try:
        value = _decode(line)
    except (ValueError, RecursionError):
        return None
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    if kind not in RECORD_TYPES:
        return UnknownRecord(kind)
    try:
        # JSON's keys are text, also those that stand for numbers
        return msgspec.convert(value, RECORD_TYPES[kind], str_keys=True)
    except ValueError:
        return None


def _decode(line: bytes) -> Any:
    if b"NaN" in line or b"Infinity" in line:
        line = json.dumps(json.loads(line, parse_constant=lambda _: None)).encode()
    return msgspec.json.decode(line)


# `RunLogTail`: records that another process appended to `metrics.jsonl` since the last look.


REMEMBERED_BYTES = 512
"""Bytes before the reading position, which tell a rewritten file from one that grew.

A resumed run rewrites what follows its checkpoint. The new text may be longer than the old, but
the times in it differ."""


class RunLogTail:
    """Reads `metrics.jsonl` as it grows, each line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._before = b""

    def read(self) -> tuple[bool, list[Record]]:
        """Whether the file was rewritten, so that its records start over, and the new records.

        An unfinished line is left for the next call. A damaged line is skipped.
        """
        if not self._path.exists():  # the run has not begun, or its directory was moved
            rewritten = self._position > 0
            self._position, self._before = 0, b""
            return rewritten, []
        with self._path.open("rb") as file:
            rewritten = not self._is_continued(file)
            if rewritten:
                self._position, self._before = 0, b""
            file.seek(self._position)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._position += len(complete)
        self._before = (self._before + complete)[-REMEMBERED_BYTES:]
        records = [parse(line) for line in complete.splitlines()]
        return rewritten, [r for r in records if r is not None and not isinstance(r, UnknownRecord)]

    def _is_continued(self, file: IO[bytes]) -> bool:
        file.seek(self._position - len(self._before))
        return file.read(len(self._before)) == self._before
