"""`Record`: all that a run's folder tells, whatever became of the run."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JOURNAL = "metrics.jsonl"
SETTINGS = "config.toml"
MOST_PROBLEMS = 5  # named one by one

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
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        record.problems.append(f"{SETTINGS} could not be read: {error}")
    try:
        with journal.open("rb") as lines:
            _read_lines(record, lines)
    except OSError as error:
        record.problems.append(f"{JOURNAL} could not be read: {error}")
    return record


def _read_lines(record: Record, lines: Any) -> None:
    damaged = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            kind = entry["kind"]
        except (ValueError, KeyError, TypeError):  # cut off by a kill, or edited by hand
            damaged.append(number)
            continue
        record.entries.setdefault(kind, []).append(entry)
    if damaged:
        shown = ", ".join(map(str, damaged[:MOST_PROBLEMS]))
        more = len(damaged) - MOST_PROBLEMS
        text = f"lines {shown}" if len(damaged) > 1 else f"line {shown}"
        text += f" and {more} more" if more > 0 else ""
        record.problems.append(f"{JOURNAL}: {text} could not be read and were passed over")
