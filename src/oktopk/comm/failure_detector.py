"""The roll call: when an exchange fails, the living ranks find out together who is missing.

A connection only tells whose message did not come, and that rank may itself have waited for a third
one; an allreduce tells nothing. So every rank leaves its last word in the process group's store,
calls for the words of the others, and names those that gave a cause or gave no word at all.

One thread does all this, so a rank answers while it computes, and while its exchange waits for a
message that will never come. It looks at one key every second or so. A store that is dead or
stopped itself blocks this thread alone. There is one per job where oktopk made the process group
(`join.joined`), and one per handle elsewhere.
"""

from __future__ import annotations

import json
import re
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Protocol

import torch.distributed as dist

from oktopk.errors import ExchangeError

LOST = (
    "the store of the process group does not answer, so nobody could be asked: it usually lives in "
    "rank 0 of the job, look there first"
)
LOOKS = 5  # times a rank looks for an alarm while another one waits for its word


class Store(Protocol):
    """What is needed of torch's key-value stores."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...


class Closes(Protocol):
    """What holds connections that others may wait at."""

    def close(self) -> None: ...


def patience_of(timeout: float) -> float:
    """The part of a timeout that is kept for the roll call, at most 5 s."""
    return min(5.0, timeout / 3)


class RollCall:
    """Answers for this rank while its process lives; asks the others once something failed."""

    def __init__(self, store: Store, rank: int, size: int, patience: float) -> None:
        self.step = 0
        """The last step this rank took part in; whoever trains keeps it up to date."""

        self._store, self._rank, self._patience = store, rank, patience
        # all ranks attach alike, so they count alike; torch may give a name of a group twice
        prefix = f"oktopk.{store.add(f'oktopk.{rank}', 1)}"
        self._alarm = f"{prefix}.alarm"
        self._keys = [f"{prefix}.{each}" for each in range(size)]
        self._cause: str | None = None
        self._verdict: str | None = None
        self._lost = LOST
        self._woken, self._said, self._over = (threading.Event() for _ in range(3))
        self._closed = False
        self._users = 1
        self._named: BaseException | None = None  # the error that says who is to blame
        self._thread = threading.Thread(target=self._run, name="oktopk-rollcall", daemon=True)
        self._thread.start()

    @property
    def verdict(self) -> str | None:
        """What the roll call found; None as long as nobody has called one."""
        return self._verdict

    def give_up(self, error: BaseException, connections: Closes) -> None:
        """Leave a last word, close the connections so that nobody waits for us, hear the verdict.

        After an error of the exchange this raises one that says who is to blame, once. An error of
        this rank alone is left to the caller; the others get to know it.
        """
        alone = not of_network(error)
        self.tell(_first_line(f"{type(error).__name__}: {error}") if alone else None)
        _free_frames(error)
        connections.close()
        if not alone and error is not self._named:
            where = f"rank {self._rank}, step {self.step}"
            reason = _first_line(str(error))
            self._named = ExchangeError(f"{where}: {self.hear()} ({reason})")
            raise self._named from error

    def tell(self, cause: str | None) -> None:
        """Leave this rank's last word: what it did wrong by itself, None if it only waited.

        Returns once the word is in the store, so connections may be closed: others will find it.
        """
        self._cause = cause
        self._woken.set()
        self._said.wait(self._patience)

    def hear(self) -> str:
        """The verdict, within the patience. To be called after `tell`."""
        self._over.wait(self._patience)
        return self._verdict or self._lost

    def share(self) -> RollCall:
        """Itself, for one more user: it ends when all of them have closed it."""
        self._users += 1
        return self

    def close(self) -> None:
        """Let the thread end; one that is stuck in a dead store is left to the daemon rule."""
        self._users -= 1
        if self._users > 0:
            return
        self._closed = True
        self._woken.set()
        self._thread.join(self._patience)

    def _run(self) -> None:
        try:
            while not self._woken.wait(self._patience / LOOKS):
                if self._store.check([self._alarm]):
                    break
            if not self._closed:
                self._verdict = self._call()
        except RuntimeError as error:  # of the store: nothing is wrong until an exchange fails
            self._lost = f"{LOST} ({error})"
        finally:
            self._said.set()
            self._over.set()

    def _call(self) -> str:
        """Say one's word, then wait for all others; most of the patience if one stays away."""
        until = monotonic() + 0.8 * self._patience
        word = {"step": self.step, "cause": self._cause}
        self._store.set(self._keys[self._rank], json.dumps(word))
        self._store.set(self._alarm, "")
        self._said.set()
        pause = threading.Event()
        while not self._store.check(self._keys) and monotonic() < until:
            pause.wait(self._patience / LOOKS / 4)
        words = {
            rank: json.loads(self._store.get(key))
            for rank, key in enumerate(self._keys)
            if self._store.check([key])
        }
        return verdict_on(words, len(self._keys))


_of_job: RollCall | None = None


@contextmanager
def of_job(roll_call: RollCall) -> Iterator[None]:
    """Let it be the one of the whole job, for as long as the block lasts."""
    global _of_job  # noqa: PLW0603 - as torch's default process group, which it watches
    before, _of_job = _of_job, roll_call
    try:
        yield
    finally:
        _of_job = before


def present() -> RollCall | None:
    """The one of the job; None where oktopk did not make the process group."""
    return _of_job


def of_network(error: BaseException) -> bool:
    """Whether an error is of a message that could not be sent or did not come: ours or torch's.

    gloo's errors have no type of their own, but begin with its name or a place in its source. DDP
    quotes ours behind words of its own; those have been explained already.
    """
    if isinstance(error, ExchangeError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(re.match(r"Gloo |\[\S*gloo/", str(error)))


def _first_line(text: str) -> str:
    """Without the C++ stack that torch may add."""
    return text.strip().split("\n")[0]


def _free_frames(error: BaseException | None) -> None:
    """Forget the locals of an error's frames: they hold the process group, and so connections."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def verdict_on(words: dict[int, dict[str, Any]], size: int) -> str:
    """Who is to blame, from the last words of the ranks that gave one."""
    found = [
        f"rank {rank} failed in step {word['step']}: {word['cause']}"
        for rank, word in sorted(words.items())
        if word["cause"]
    ]
    found += [
        f"rank {rank} does not answer: it died, stopped, or ended before the others"
        for rank in range(size)
        if rank not in words
    ]
    if found:
        return "; ".join(found)
    last = min(words, key=lambda rank: words[rank]["step"])
    return (
        f"all ranks answer, the last of them rank {last} in step {words[last]['step']}: a rank "
        "came later than `timeout`, went another way or lost a connection"
    )
