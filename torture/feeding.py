# SPDX-License-Identifier: Apache-2.0
"""Feed odd inputs to readers in processes of their own, within bounds of time and memory."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from torture import input_messages, inputs
from torture.base import prepare, stub
from torture.desk import Desk, Input, LostError
from torture.processes import Child, forkserver
from torture.verdicts import Finding, Result
from torture.world import ABORTED

SECONDS, LATER = 5.0, 20.0
"""What an input may take, and when a process that does not even say so is killed."""
MEGABYTES, MORE_MEMORY = 400, 3 << 30


class TookTooLongError(BaseException):
    """Not an Exception, so that no reader takes it for an error of its own."""


def serve(pipe: Any, base: str, scratch: str) -> None:
    """Take inputs until there are no more."""
    stub()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ["OMP_NUM_THREADS"] = "1"
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + MORE_MEMORY, own + MORE_MEMORY))
    signal.signal(signal.SIGALRM, _late)
    Path(scratch).mkdir(parents=True)
    while (task := pipe.recv()) is not None:
        pipe.send(fed(*task, Path(base), Path(scratch)))


def _late(*_: Any) -> None:
    raise TookTooLongError


def fed(kind: str, seed: int, base: Path, scratch: Path) -> tuple[str, list[Finding]]:
    """Make one input, have it read, and judge what came of it."""
    folder = scratch / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    argv, env, here = sys.argv, dict(os.environ), os.getcwd()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    os.chdir(folder)
    said, found, what = io.StringIO(), [], ""
    try:
        one = (inputs.KINDS | input_messages.KINDS)[kind](
            Desk(Random(f"{kind}/{seed}"), base, folder)
        )
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            found = outcome(one, said)
        what = one.what[:2000]
    except Exception:  # noqa: BLE001 - one broken input must not end the others
        found = [Finding("unclear", f"the input could not be made: {traceback.format_exc()}")]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.argv = argv
        os.chdir(here)
        os.environ.clear()
        os.environ.update(env)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if grown > MEGABYTES:
        found.append(Finding("hang", f"it took {grown} MB of memory"))
    if strange := set(os.listdir(scratch)) - {"work"}:
        found.append(Finding("difference", f"code ran, or it wrote elsewhere: {strange}"))
        for name in strange:
            shutil.rmtree(scratch / name) if (scratch / name).is_dir() else (
                scratch / name
            ).unlink()
    return what, found


def outcome(one: Input, said: io.StringIO) -> list[Finding]:
    """Have an input read, within the bound of time."""
    try:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            one.call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:  # noqa: BLE001 - judged by type and message
        wrong = complaint(error, one, said.getvalue())
        return [Finding(*wrong)] if wrong else []
    return []


def complaint(error: BaseException, one: Input, said: str) -> tuple[str, str] | None:
    """What is wrong with the way in which an input was refused: the column, and what was seen."""
    if isinstance(error, TookTooLongError):
        return "hang", f"it took more than {SECONDS:g} s"
    if isinstance(error, MemoryError):
        return "hang", f"it asked for more than {MORE_MEMORY >> 30} GB"
    if isinstance(error, LostError):
        return "lost", str(error)
    if isinstance(error, SystemExit):
        text = f"{said}{error.code if isinstance(error.code, str) else ''}"
        if "Traceback" in text or ABORTED.search(text):
            return "unclear", f"a traceback: {text[-400:]}"
        silent = error.code and not text.strip()
        return ("unclear", f"exit code {error.code} without a word") if silent else None
    where = (traceback.extract_tb(error.__traceback__) or [None])[-1]
    place = f"{Path(where.filename).name}:{where.lineno}" if where else "nowhere"
    text = f"{type(error).__name__} in {place}: {error}"[:500]
    if not isinstance(error, one.allowed):
        return "unclear", f"an error of no documented type: {text}"
    if not str(error) or (one.names and not any(name in str(error) for name in one.names)):
        return "unclear", f"it does not say what is wrong: {text}"
    return None


class Feeder:
    """A process that reads inputs; another one takes its place when it had to be killed."""

    def __init__(self, base: Path, scratch: Path) -> None:
        self._base, self._scratch = base, scratch
        self._process: Child | None = None

    def feed(self, kind: str, seed: int) -> Result:
        began = time.monotonic()
        if self._process is None:
            self._start()
        self._pipe.send((kind, seed))
        what, found = "", []
        try:
            if self._pipe.poll(LATER):
                what, found = self._pipe.recv()
            else:
                found = [Finding("hang", f"the process did not answer within {LATER:g} s")]
                self.close(kill=True)
        except EOFError:
            self._process.join(5)
            found = [Finding("unclear", f"the process died: {self._process.exitcode}")]
            self.close(kill=True)
        took = time.monotonic() - began
        return Result(kind, seed, "inputs", what, tuple(found), seconds=took)

    def _start(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._pipe, theirs = forkserver().Pipe()
        args = theirs, str(self._base), str(self._scratch)
        self._process = Child(serve, *args, daemon=True)
        self._process.start()
        theirs.close()

    def close(self, kill: bool = False) -> None:
        if self._process is not None:
            if not kill:
                self._pipe.send(None)
                self._process.join(5)
            self._process.kill()
            self._process = None
        shutil.rmtree(self._scratch, ignore_errors=True)


def feed(
    planned: list[tuple[str, int]], out: Path, until: float, processes: int
) -> Iterator[Result]:
    """What came of every input, in the order in which they were done."""
    if not planned:
        return
    base = out / "base"
    preparing = Child(prepare, str(base))
    preparing.start()
    preparing.join(120)
    preparing.kill()
    assert (base / "ready").exists(), (base / "prepare.log").read_text()[-2000:]
    waiting: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    for task in planned:
        waiting.put(task)
    done: queue.SimpleQueue[Result | None] = queue.SimpleQueue()

    def work(number: int) -> None:
        feeder = Feeder(base, out / f"scratch-{number}")
        try:
            while time.monotonic() < until:
                done.put(feeder.feed(*waiting.get_nowait()))
        except queue.Empty:
            pass
        finally:
            feeder.close()
            done.put(None)

    threads = [threading.Thread(target=work, args=[number]) for number in range(processes)]
    for thread in threads:
        thread.start()
    yield from _until_all_ended(done, len(threads))
    shutil.rmtree(base, ignore_errors=True)


def _until_all_ended(done: Any, left: int) -> Iterable[Result]:
    while left:
        result = done.get()
        left -= result is None
        if result is not None:
            yield result
