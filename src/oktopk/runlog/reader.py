# SPDX-License-Identifier: Apache-2.0
"""`RunLog`: everything that is recorded in a run directory, however the run ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec

from oktopk.runlog.run_directory import CONFIG_FILE, METRICS_FILE
from oktopk.runlog.schema import (
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
from oktopk.utils.files import FileError, convert, parse_toml, read_text
from oktopk.utils.units import list_some

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
