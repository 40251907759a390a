# SPDX-License-Identifier: Apache-2.0
"""Failure detection: when an exchange fails, the ranks find out together which rank caused it.

A connection only tells whose message did not arrive, and that rank may itself have waited for a
third one; an allreduce tells nothing. So when a rank fails, it sets the failure key in the store of
the process group. Every rank that sees the key writes a report: its step, and the error if it
failed by itself. Then each rank reads all reports. Ranks that reported an error, or did not report
in time, are the cause.

A thread of its own does all this. So a rank also reports while it computes, and while its exchange
waits for a message that will never arrive. The thread looks at the failure key about once a second.
A store that is dead or stopped blocks only this thread. There is one detector per job where oktopk
made the process group (`launch.process_group`), else one per handle.
"""

from __future__ import annotations

import json
import re
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Protocol

import torch.distributed as dist

from oktopk.comm.consistency import Store
from oktopk.errors import ExchangeError, MessageError

STORE_UNREACHABLE = (
    "the store of the process group does not answer, so no rank could be asked: it usually lives "
    "in rank 0 of the job, look there first"
)
POLLS = 5  # times a rank looks at the failure key while another one waits for its report


class Closeable(Protocol):
    """Holds connections on which other ranks may wait."""

    def close(self) -> None: ...


class FailureDetector(Protocol):
    """What an adapter needs to name the rank that made an exchange fail."""

    step: int
    """The last step this rank took part in. The training loop or the adapter updates it."""

    hint: str
    """What else a rank may have done that the others wait for; empty if nothing is known."""

    @property
    def diagnosis(self) -> str | None:
        """Which rank caused the failure, in a sentence; None while no rank has failed."""
        ...

    def abort(self, error: BaseException, connections: Closeable) -> None:
        """Report the error to the other ranks and close the connections, so that nobody waits.

        If it was a network error, raise an ExchangeError that names the rank that caused it.
        """
        ...

    def close(self) -> None:
        """Stop watching."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank tells the others after a failure."""

    step: int
    """The step it was in."""

    cause: str | None
    """Its own error; None if it only waited for others."""


def detection_seconds(timeout: float) -> float:
    """Return the part of a timeout that is reserved for finding the cause of a failure: <= 5 s."""
    return min(5.0, timeout / 3)


class StoreFailureDetector:
    """A `FailureDetector` that works through the store of the process group.

    All ranks must create their detectors in the same order. A failure is diagnosed within `seconds`
    after a rank has reported it. `rank` and `ranks`, all that are watched, are numbers in the job.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], seconds: float) -> None:
        self.step, self.hint = 0, ""
        self._store, self._rank, self._seconds = store, rank, seconds
        # every rank counts its own detectors: torch may use the name of a group twice
        prefix = f"oktopk.{store.add(f'oktopk.{rank}', 1)}"
        self._failure_key = f"{prefix}.failed"
        self._report_keys = {each: f"{prefix}.{each}" for each in ranks}
        self._cause: str | None = None
        self._diagnosis: str | None = None
        self._store_error = STORE_UNREACHABLE
        self._wake, self._reported, self._finished = (threading.Event() for _ in range(3))
        self._closed = False
        self._num_users = 1
        self._raised: BaseException | None = None  # by `abort`: it names the rank already
        self._thread = threading.Thread(target=self._run, name="oktopk-failures", daemon=True)
        self._thread.start()

    @property
    def diagnosis(self) -> str | None:
        return self._diagnosis

    def abort(self, error: BaseException, connections: Closeable) -> None:
        """See `FailureDetector.abort`. An error that it raised itself is not raised once more."""
        own = not is_network_error(error)
        self.report(_first_line(f"{type(error).__name__}: {error}") if own else None)
        _clear_frames(error)
        connections.close()
        if not own and error is not self._raised:
            where = f"rank {self._rank}, step {self.step}"
            reason = _first_line(str(error))
            self._raised = ExchangeError(f"{where}: {self.wait_diagnosis()} ({reason})")
            raise self._raised from error

    def report(self, cause: str | None) -> None:
        """Write this rank's report: its own error, or None if it only waited for others.

        Returns when the report is in the store. Connections may be closed then: the other ranks
        will find it.
        """
        self._cause = cause
        self._wake.set()
        self._reported.wait(self._seconds)

    def wait_diagnosis(self) -> str:
        """Wait for the diagnosis, at most `seconds`. To be called after `report`."""
        self._finished.wait(self._seconds)
        return self._diagnosis or self._store_error

    def share(self) -> StoreFailureDetector:
        """Return itself for one more user. It stops when all users have closed it."""
        self._num_users += 1
        return self

    def close(self) -> None:
        """Stop the thread. If it is stuck in a dead store, it ends with the process."""
        self._num_users -= 1
        if self._num_users > 0:
            return
        self._closed = True
        self._wake.set()
        self._thread.join(self._seconds)

    def _run(self) -> None:
        try:
            while not self._wake.wait(self._seconds / POLLS):
                if self._store.check([self._failure_key]):
                    break
            if not self._closed:
                self._diagnosis = self._diagnose()
        except RuntimeError as error:  # of the store: nothing is wrong until an exchange fails
            self._store_error = f"{STORE_UNREACHABLE} ({error})"
        finally:
            self._reported.set()
            self._finished.set()

    def _diagnose(self) -> str:
        """Write this rank's report, collect those of the others, and name the cause."""
        deadline = monotonic() + 0.8 * self._seconds
        mine = Report(self.step, self._cause)
        self._store.set(self._report_keys[self._rank], json.dumps(asdict(mine)))
        self._store.set(self._failure_key, "")
        self._reported.set()
        pause = threading.Event()
        keys = list(self._report_keys.values())
        while not self._store.check(keys) and monotonic() < deadline:
            pause.wait(self._seconds / POLLS / 4)
        reports = {
            rank: Report(**json.loads(self._store.get(key)))
            for rank, key in self._report_keys.items()
            if self._store.check([key])
        }
        return diagnose(reports, list(self._report_keys), self.hint)


class NoFailureDetector:
    """For ranks that share no store: errors are raised as they are."""

    step, hint = 0, ""
    diagnosis: str | None = None

    def abort(self, error: BaseException, connections: Closeable) -> None:
        connections.close()

    def close(self) -> None: ...


_job_detector: StoreFailureDetector | None = None


@contextmanager
def use_for_job(detector: StoreFailureDetector) -> Iterator[None]:
    """Make it the detector of the whole job (`job_detector`) during the block."""
    global _job_detector  # noqa: PLW0603 - as torch's default process group, which it watches
    before, _job_detector = _job_detector, detector
    try:
        yield
    finally:
        _job_detector = before


def job_detector() -> StoreFailureDetector | None:
    """Return the detector of the job; None where oktopk did not make the process group."""
    return _job_detector


def is_network_error(error: BaseException) -> bool:
    """Whether a message could not be sent or did not arrive, by an error of ours or of torch's.

    gloo's errors have no type of their own, but begin with its name or a place in its source. DDP
    quotes our errors inside its own; those do not match, since they name the rank already. Nor does
    a damaged message: only the rank that read it knows of it, so it has to tell the others.
    """
    if isinstance(error, ExchangeError | dist.DistError):
        return not isinstance(error, MessageError)
    return isinstance(error, RuntimeError) and bool(re.match(r"Gloo |\[\S*gloo/", str(error)))


def _first_line(text: str) -> str:
    """Drop the C++ stack that torch may add."""
    return text.strip().split("\n")[0]


def _clear_frames(error: BaseException | None) -> None:
    """Forget the locals of an error's frames: they hold the process group, and so connections."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def diagnose(reports: dict[int, Report], ranks: Sequence[int], hint: str = "") -> str:
    """Name those of the ranks that caused a failure, from the reports that arrived.

    `hint` is what a rank may have done where all of them answer.
    """
    causes = [
        f"rank {rank} failed in step {report.step}: {report.cause}"
        for rank, report in sorted(reports.items())
        if report.cause
    ]
    causes += [
        f"rank {rank} does not answer: it died, stopped, or ended before the others"
        for rank in ranks
        if rank not in reports
    ]
    if causes:
        return "; ".join(causes)
    last = min(reports, key=lambda rank: reports[rank].step)
    reasons = ["later than `timeout`", "called other collectives", hint, "or lost a connection"]
    return (
        f"all ranks answer, the last of them rank {last} in step {reports[last].step}: a rank was "
        + ", ".join(filter(None, reasons))
    )
