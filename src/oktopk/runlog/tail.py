"""`Follower`: what is new in a journal that somebody else writes."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from oktopk.runlog.reader import Entry, parse

REMEMBERED = 512
"""Bytes before the place reached. A resumed run writes anew what follows its checkpoint: that may
be longer than what was there, but it has other clocks in it."""


class Follower:
    """Reads a journal as it grows; only what is new is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._before = b""

    def read(self) -> tuple[bool, list[Entry]]:
        """Whether the journal was written anew, so that all of it comes again, and new entries.

        A line that is not finished waits for the next look. A damaged one is passed over.
        """
        if not self._path.exists():  # not begun yet, or moved away
            anew = self._place > 0
            self._place, self._before = 0, b""
            return anew, []
        with self._path.open("rb") as file:
            anew = not self._goes_on(file)
            if anew:
                self._place, self._before = 0, b""
            file.seek(self._place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        self._before = (self._before + whole)[-REMEMBERED:]
        found = [parse(line) for line in whole.splitlines()]
        return anew, [entry for entry in found if entry is not None]

    def _goes_on(self, file: IO[bytes]) -> bool:
        file.seek(self._place - len(self._before))
        return file.read(len(self._before)) == self._before
