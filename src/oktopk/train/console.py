"""What a person sees while it runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from oktopk.utils.units import clock


class LineHandler(logging.Handler):
    """Log lines to stderr as it is at that moment: a progress bar takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")
        sys.stderr.flush()


def say(text: str) -> None:
    """One line to the person in front of it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Bar:
    """Progress over all steps of a run."""

    def __init__(self, total: int, done: int, every: int) -> None:
        self._total, self._first, self._every = total, done, every
        self._started = time.monotonic()
        self._sent = self._dense = 0
        self._progress = None
        if sys.stdout.isatty():
            # here: other commands say something too, and need not have rich
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = ("{task.description}", BarColumn(), "{task.completed}/{task.total}")
            shown = [TextColumn(c) if isinstance(c, str) else c for c in columns]
            self._progress = Progress(*shown, TimeRemainingColumn(), console=Console())
            self._task = self._progress.add_task("", total=total, completed=done)
            self._progress.start()

    def step(self, entry: dict[str, Any]) -> None:
        """Show one finished step; its loss is this worker's own."""
        self._sent += entry["bytes_sent"]
        self._dense += entry["bytes_dense"]
        done = entry["step"] + 1
        if self._progress is not None:
            self._progress.update(self._task, completed=done, description=self._text(entry))
        elif done % self._every == 0 or done == self._total:
            per_step = (time.monotonic() - self._started) / (done - self._first)
            left = clock(per_step * (self._total - done))
            say(f"step {done}/{self._total}  {self._text(entry)}  {left} left")

    def _text(self, entry: dict[str, Any]) -> str:
        loss = "skipped" if entry["skipped"] else f"loss {entry['loss']:.2f}"
        saved = 1 - self._sent / self._dense if self._dense else 0.0
        kept = entry["result"] / entry["numel"] if entry["numel"] else 0.0
        return f"{loss}  {entry['phase']}  density {kept:.2%}  bytes saved {saved:.0%}"

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            say(text)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
