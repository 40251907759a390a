"""`Seen`: what a journal has told so far, in sums, so that a long run stays small."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from oktopk.runlog.reader import Entry, has_checkpoint
from oktopk.runlog.tail import Follower
from oktopk.stats import PHASES

RECENT = 50
"""Steps that say how fast it goes now."""


@dataclass(slots=True)
class Seen:
    """A run up to now. Bytes are those of worker 0."""

    opening: Entry = field(default_factory=dict)
    last: Entry = field(default_factory=dict)
    """The last step."""

    end: Entry | None = None
    losses: list[float] = field(default_factory=list)
    validated: list[Entry] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    resumable: bool = False
    """Whether the run has a checkpoint."""

    skipped: int = 0
    sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    as_dense: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    recent: deque[Entry] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def steps(self) -> int:
        return self.last["step"] + 1 if self.last else 0

    def take(self, entry: Entry) -> None:
        """Add one entry of the journal; kinds that are not shown are passed over."""
        if entry["kind"] in TAKERS:
            TAKERS[entry["kind"]](self, entry)


def _take_run(seen: Seen, entry: Entry) -> None:
    seen.opening, seen.end = entry, None


def _take_step(seen: Seen, entry: Entry) -> None:
    seen.last = entry
    seen.recent.append(entry)
    seen.skipped += bool(entry.get("skipped"))
    if entry.get("loss") is not None:  # a journal of somebody's own training may have none
        seen.losses.append(entry["loss"])
    seen.sent[entry["phase"]] += entry["bytes_sent"]
    seen.as_dense[entry["phase"]] += entry["bytes_dense"]


def _take_epoch(seen: Seen, entry: Entry) -> None:
    if entry.get("wer") is not None:
        seen.validated.append(entry)


def _take_warning(seen: Seen, entry: Entry) -> None:
    seen.warnings.append(entry["text"])


def _take_end(seen: Seen, entry: Entry) -> None:
    seen.end = entry


TAKERS: dict[str, Callable[[Seen, Entry], None]] = {
    "run": _take_run,
    "step": _take_step,
    "epoch": _take_epoch,
    "warning": _take_warning,
    "end": _take_end,
}


class Watched:
    """A journal and what was seen of it."""

    def __init__(self, journal: Path) -> None:
        self._folder = journal.parent
        self._follower = Follower(journal)
        self.seen = Seen()

    def look(self) -> Seen:
        """Read what is new. A run that resumed is seen from its beginning again."""
        anew, entries = self._follower.read()
        if anew:
            self.seen = Seen()
        for entry in entries:
            self.seen.take(entry)
        self.seen.resumable = has_checkpoint(self._folder)
        return self.seen
