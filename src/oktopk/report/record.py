"""`Record`: all that a run's folder tells, whatever became of the run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oktopk.report.units import few

JOURNAL = "metrics.jsonl"
SETTINGS = "config.toml"
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


def read(folder: Path) -> Record:
    """Read a run's folder. What is missing or damaged becomes a problem, not an error."""
    record = Record(folder)
    settings, journal = folder / SETTINGS, folder / JOURNAL
    try:
        record.config = tomllib.loads(settings.read_text())
    except FileNotFoundError:  # a journal of another program has none
        pass
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        record.problems.append(f"{SETTINGS} could not be read: {error}")
    try:
        with journal.open("rb") as lines:
            _read_lines(record, lines)
    except FileNotFoundError:
        record.problems.append(f"There is no {JOURNAL} in {folder}.")
    except OSError as error:
        record.problems.append(f"{JOURNAL} could not be read: {error}")
    return record


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


# what every reader counts on, by kind; other fields may be missing
NEEDED: dict[str, dict[str, type]] = {
    "step": {"step": int, "phase": str, "bytes_sent": int, "bytes_dense": int},
    "epoch": {"step": int, "epoch": int},
    "run": {"step": int},
    "end": {"how": str},
    "warning": {"text": str},
    "probe": {"step": int},
    "tensors": {"step": int, "kept": dict, "of": dict},
    "messages": {"step": int, "sent": dict},
    "ranks": {"step": int, "steps": int, "seconds": list},
    "memory": {"ranks": list},
}


def parse(line: bytes) -> Entry | None:
    """One line of a journal; None when it was cut off by a kill, or is of another kind of file.

    NaN and Infinity, which other writers of JSON know, are read as null.
    """
    try:
        entry = json.loads(line, parse_constant=lambda _: None)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        return None
    needed = NEEDED.get(entry["kind"], {})
    fits = all(isinstance(entry.get(name), kind) for name, kind in needed.items())
    return entry if fits else None
