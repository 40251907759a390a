# SPDX-License-Identifier: Apache-2.0
"""`RunLogTail`: records that another process appended to `metrics.jsonl` since the last look."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from oktopk.runlog.reader import parse
from oktopk.runlog.schema import Record, UnknownRecord

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
