# SPDX-License-Identifier: Apache-2.0
"""Progress of work that takes more than a moment: one line that says how long it may still take."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from oktopk.utils.units import format_duration

SLOW_SECONDS = 1.0
QUIET_SECONDS = 2.0
"""Seconds in which nothing is shown: work that is done by then needs no line."""
LINE_SECONDS = 15.0
"""Seconds between two lines, when stdout is not a terminal."""


@contextmanager
def said_if_slow(what: str) -> Iterator[None]:
    """Print what is being done, if the block takes more than a second."""

    def say() -> None:
        sys.stderr.write(f"{what}\n")  # what a command prints may go to a pipe
        sys.stderr.flush()

    timer = Timer(SLOW_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class TimeLeft:
    """Shows how much of some work is done, and how long the rest may take.

    On a terminal the line is rewritten in place and erased at the end; elsewhere a line is printed
    now and then, or never if `in_pipes` is False.
    """

    def __init__(self, what: str, total: int, in_pipes: bool = True) -> None:
        self._what, self._total, self._in_pipes = what, total, in_pipes
        self._on_terminal = sys.stdout.isatty()
        self._started = time.monotonic()
        wait = QUIET_SECONDS if self._on_terminal else LINE_SECONDS
        self._due = self._started + wait
        self._width = 0
        self._done = 0

    def advance(self) -> None:
        """Show that one more of the parts is done, if it is time for a line."""
        self(self._done + 1)

    def __call__(self, done: int) -> None:
        """Show that `done` of the parts are done, if it is time for a line."""
        self._done = done
        if time.monotonic() < self._due:
            return
        if self._on_terminal:
            self._due = time.monotonic() + 0.1
            text = self.line(done)
            sys.stdout.write(f"\r{text:{self._width}}")
            sys.stdout.flush()
            self._width = len(text)
        elif self._in_pipes:
            self._due = time.monotonic() + LINE_SECONDS
            sys.stdout.write(f"{self.line(done)}\n")
            sys.stdout.flush()

    def line(self, done: int) -> str:
        """Return the line: what is being done, how far it is, and the time that is left."""
        text = f"{self._what}: {done} of {self._total}"
        if not done:
            return text
        left = (time.monotonic() - self._started) / done * (self._total - done)
        return f"{text}, {format_duration(left)} left"

    def clear(self) -> None:
        """Erase the line from the terminal, so that something else can be printed."""
        if self._width:
            sys.stdout.write(f"\r{'':{self._width}}\r")
            sys.stdout.flush()
            self._width = 0

    def __enter__(self) -> TimeLeft:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
