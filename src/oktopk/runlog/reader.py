"""`Record`: all that a run's folder tells, whatever became of the run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from oktopk.runlog.schema import KINDS, Config
from oktopk.utils.files import (
    FileError,
    checked,
    parse_toml,
    read_text,
)
from oktopk.utils.units import few

JOURNAL = "metrics.jsonl"
SETTINGS = "config.toml"
CHECKPOINTS = "checkpoints"
LONGEST_LINE = 64 * 2**20
"""Bytes of a line: one that never ends must not fill the memory."""
MOST_PROBLEMS = 5  # named one by one

PARTS: tuple[str, ...] = ("data", "forward", "backward", "exposed", "optimizer")
"""Seconds of a step that follow one another; `exposed` is what was waited for the exchange."""

OVERLAPPED: tuple[str, ...] = ("select", "exchange", "scatter")
"""Seconds of the exchange's own moves, while backward goes on."""

TIMES = (*PARTS, *OVERLAPPED, "whole")

Entry = dict[str, Any]


@dataclass(slots=True)
class Record:
    """A run's journal by kind, in order; lists are empty where nothing was written."""

    folder: Path
    config: Entry = field(default_factory=dict)
    entries: dict[str, list[Entry]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What could not be read, for people."""

    def of(self, kind: str) -> list[Entry]:
        return self.entries.get(kind, [])

    @property
    def steps(self) -> list[Entry]:
        return self.of("step")

    @property
    def epochs(self) -> list[Entry]:
        return self.of("epoch")

    @property
    def validated(self) -> list[Entry]:
        """The epochs that have error rates."""
        return [entry for entry in self.epochs if entry.get("wer") is not None]

    @property
    def opening(self) -> Entry:
        """What was known when the run began or was last resumed; empty when it never began."""
        return self.of("run")[-1] if self.of("run") else {}

    @property
    def end(self) -> Entry | None:
        """How the run ended; None while it goes on, or when it was killed."""
        return self.of("end")[-1] if self.of("end") else None

    @property
    def finished(self) -> bool:
        return self.end is not None and self.end["how"] == "finished"


def has_checkpoint(folder: Path) -> bool:
    """Whether there is something to resume in a run's folder."""
    return any(folder.glob(f"{CHECKPOINTS}/step-*/complete.json"))


def read(folder: Path) -> Record:
    """Read a run's folder. What is missing or damaged becomes a problem, not an error."""
    record = Record(folder)
    settings, journal = folder / SETTINGS, folder / JOURNAL
    if settings.exists():  # a journal of another program has none
        try:
            found = parse_toml(read_text(settings), SETTINGS)
            checked(found, Config, SETTINGS)
            record.config = found
        except FileError as error:
            record.problems.append(f"{SETTINGS} could not be read: {error}")
    try:
        with journal.open("rb") as file:
            _read_lines(record, _lines(file))
    except FileNotFoundError:
        record.problems.append(f"There is no {JOURNAL} in {folder}.")
    except OSError as error:
        record.problems.append(f"{JOURNAL} could not be read: {error}")
    return record


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(LONGEST_LINE):
        yield line


def _read_lines(record: Record, lines: Iterable[bytes]) -> None:
    damaged = []
    for number, line in enumerate(lines, 1):
        entry = parse(line)
        if entry is None:
            damaged.append(number)
        else:
            record.entries.setdefault(entry["kind"], []).append(entry)
    if damaged:
        lines_are, were = ("line", "was") if len(damaged) == 1 else ("lines", "were")
        text = f"{lines_are} {few(damaged, MOST_PROBLEMS)}"
        record.problems.append(f"{JOURNAL}: {text} could not be read and {were} passed over")


def parse(line: bytes) -> Entry | None:
    """One line of a journal; None when it was cut off by a kill, or is of another kind of file.

    NaN and Infinity, which other writers of JSON know, are read as null.
    """
    try:
        entry = _decoded(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        return None
    if entry["kind"] not in KINDS:
        return entry
    try:
        # keys of JSON objects are text, also those that stand for numbers
        msgspec.convert(entry, KINDS[entry["kind"]], str_keys=True)
    except ValueError:
        return None
    return entry  # with the fields that the schema does not know


def _decoded(line: bytes) -> Any:
    if b"NaN" in line or b"Infinity" in line:
        line = json.dumps(json.loads(line, parse_constant=lambda _: None)).encode()
    return msgspec.json.decode(line)
