# SPDX-License-Identifier: Apache-2.0
"""Lines, progress and tables for people."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Timer

from oktopk.utils.arguments import format_duration

# Lines that a person sees whether or not the program has configured logging.


log = logging.getLogger("oktopk")


def announce(text: str) -> None:
    """Log a line at INFO under the name `oktopk`; write it to stderr if no handler would show it.

    Python shows only warnings until a program configures logging, and most training scripts never
    do. A program that raised the level of this logger, or disabled it, has asked for silence.
    """
    if _has_handler():
        log.info("%s", text)
    elif not _is_silenced():
        sys.stderr.write(f"oktopk: {text}\n")
        sys.stderr.flush()


def _has_handler() -> bool:
    """Whether some handler of the logger, or of one above it, takes lines at INFO."""
    if not log.isEnabledFor(logging.INFO):
        return False
    logger: logging.Logger | None = log
    while logger is not None:
        if any(handler.level <= logging.INFO for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _is_silenced() -> bool:
    return log.disabled or log.level > logging.INFO or log.manager.disable >= logging.INFO


# Progress of work that takes more than a moment: one line that says how long it may still take.


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


# Tables for people: drawn by rich on a terminal, plain text in a pipe or a file.


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: bool = False) -> None:
    """Print a table; with `right`, all columns but the first are aligned right."""
    if is_drawn():
        _draw(head, rows, right)
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if right and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def is_drawn() -> bool:
    """Whether tables are drawn: stdout is a terminal, and rich is installed."""
    return sys.stdout.isatty() and find_spec("rich") is not None


def _draw(head: Sequence[str], rows: Sequence[Sequence[str]], right: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, title in enumerate(head):
        table.add_column(title, justify="right" if right and place else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False, highlight=False)
