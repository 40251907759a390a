# SPDX-License-Identifier: Apache-2.0
"""What a trial came to, and the table of all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

COLUMNS = {
    "hang": "hangs",
    "difference": "silent differences",
    "lost": "lost data",
    "unclear": "unclear messages",
}
"""How a trial can fail, and the heading. A bound of time or memory that is exceeded and anything
left behind is a hang; code that ran or a file written elsewhere is a silent difference."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: a key of COLUMNS, and what was seen."""

    column: str
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """One trial or one input."""

    kind: str
    seed: int
    part: str
    """`faults` or `inputs`."""

    what: str
    """What was done, in one line."""

    findings: tuple[Finding, ...] = ()
    skipped: str = ""
    """Why it could not be tried here; empty when it was."""

    seconds: float = 0.0

    @property
    def repeat(self) -> str:
        return f"python -m torture --only {self.kind} --seed {self.seed}"


def rows_of(results: Iterable[Result]) -> list[dict[str, int | str]]:
    """A row per kind: trials, and how many of them failed in each way."""
    rows: dict[str, dict[str, int | str]] = {}
    for result in results:
        empty = {"part": result.part, "kind": result.kind, "trials": 0, "skipped": 0, "seconds": 0}
        row = rows.setdefault(result.kind, empty | dict.fromkeys(COLUMNS, 0))
        row["skipped" if result.skipped else "trials"] += 1  # type: ignore[operator]
        row["seconds"] += result.seconds  # type: ignore[operator]
        for column in {finding.column for finding in result.findings}:
            row[column] += 1  # type: ignore[operator]
    return sorted(rows.values(), key=lambda row: (row["part"], row["kind"]))


def total(rows: list[dict[str, int | str]], part: str) -> dict[str, int | str]:
    """The sum of the rows of a part."""
    names = ("trials", "skipped", *COLUMNS)
    own = [row for row in rows if row["part"] == part]
    sums: dict[str, int | str] = {name: sum(int(row[name]) for row in own) for name in names}
    return {"part": part, "kind": f"all {part}"} | sums


def markdown(results: list[Result]) -> str:
    """The table, then every trial that failed with the command that repeats it."""
    rows = rows_of(results)
    parts = sorted({str(row["part"]) for row in rows})
    rows += [total(rows, part) for part in parts]
    names = ("kind", "trials", *COLUMNS, "skipped")
    lines = ["| " + " | ".join(COLUMNS.get(name, name) for name in names) + " |"]
    lines += ["|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    skipped = {result.kind: result.skipped for result in results if result.skipped}
    lines += ["", *(f"{kind} was skipped: {why}" for kind, why in skipped.items())]
    failed = [result for result in results if result.findings]
    for result in failed:
        lines += ["", f"`{result.repeat}`  ", f"{_one_line(result.what)}  "]
        lines += [f"- {f.column}: {_one_line(f.text)}" for f in result.findings]
    return "\n".join(lines) + "\n"


def _one_line(text: str, most: int = 600) -> str:
    text = text.encode("utf-8", "backslashreplace").decode().replace("\n", " / ")
    return text if len(text) <= most else f"{text[:most]}..."


def write(folder: Path, results: list[Result]) -> str:
    """Both forms of the report; the Markdown is returned."""
    text = markdown(results)
    (folder / "torture.md").write_text(text)
    plain = [asdict(result) | {"repeat": result.repeat} for result in results if result.findings]
    (folder / "torture.json").write_text(
        json.dumps({"table": rows_of(results), "failed": plain}, indent=1)
    )
    return text


class Progress:
    """Lines about how far it is, at most one every few seconds, and the time that is left."""

    def __init__(self, deadline: float, every: float = 10.0) -> None:
        self._deadline, self._every, self._due = deadline, every, 0.0

    def say(self, part: str, done: int, of: int, failed: int) -> None:
        now = time.monotonic()
        if now >= self._due or done == of:
            self._due = now + self._every
            left = max(0.0, self._deadline - now) / 60
            print(f"{part}: {done} of {of}, {failed} failed, {left:.1f} minutes left", flush=True)
