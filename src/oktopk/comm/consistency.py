"""The handshake: all ranks compare what they are about to do; where it differs, all raise.

`attach` compares through the store of the process group, before any collective: a rank that has
another dtype or method, or that does not attach at all, would otherwise send messages of another
size than its peers expect, and gloo then ends the process. What only the first step shows (the
state that was loaded, the dtype of the gradients) is compared with one header of fixed size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from threading import Event
from time import monotonic
from typing import Any, Protocol

import torch

from oktopk.comm.communicator import Comm
from oktopk.errors import ExchangeError

ROOM = 1024  # bytes for a rank's facts as JSON
PROTOCOL = 1  # of the messages between ranks; to be raised whenever they change
SHOWN = 8  # ranks, and differences, that an error lists
LONGEST_PAUSE = 0.2  # seconds between two looks at the store
LONGEST_STAY = 5.0  # seconds a rank that must raise stays for the others


class Store(Protocol):
    """What is needed of torch's key-value stores."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


def agree(comm: Comm, device: torch.device, facts: dict[str, Any]) -> None:
    """Raise ValueError on every rank if any fact differs on any. One header of 1024 bytes."""
    text = json.dumps({name: _short(value) for name, value in facts.items()}).encode()
    assert len(text) <= ROOM, text
    mine = torch.tensor(list(text.ljust(ROOM)), dtype=torch.uint8, device=device)
    rows = comm.all_gather(mine, stage="handshake")
    if found := differences([json.loads(bytes(row)) for row in rows.tolist()]):
        raise ValueError(found)


def agree_at(
    open_store: Callable[[], Store],
    rank: int,
    size: int,
    timeout: float,
    facts: dict[str, Any],
    call: str = "attach",
    place: str = "oktopk.attach",
) -> str:
    """Compare facts through a store: ValueError on every rank if any fact differs on any.

    `place` must be the same on all ranks; the answer is one that no other comparison has.

    ExchangeError names the ranks that have not made the same `call` within `timeout` seconds. The
    rank that comes last reads a digest of each rank's facts, and the facts only where digests
    differ; the others wait for its verdict. Whoever writes a verdict first decides for all, so a
    rank that comes too late hears of it too.
    """
    try:
        store = open_store()
        # every rank counts its own calls, and all call alike: the same number is the same call
        prefix = f"{place}.{store.add(f'{place}.{rank}', 1)}"
        found = _verdict(store, prefix, rank, size, timeout, facts)
        kind, text = found if found is not None else _too_late(store, prefix, call, size, timeout)
    except RuntimeError as error:  # of torch's store
        raise ExchangeError(
            f"rank {rank}: the store of the process group does not answer, so the ranks could not "
            f"compare their settings; it usually lives in rank 0 of the job, look there ({error})"
        ) from error
    if text:
        with suppress(RuntimeError):  # the store has gone: nobody can hear any more
            _until_all_have_heard(store, prefix, min(timeout, LONGEST_STAY))
        raise (ValueError if kind == "ValueError" else ExchangeError)(text)
    return prefix


def _verdict(
    store: Store, prefix: str, rank: int, size: int, timeout: float, facts: dict[str, Any]
) -> tuple[str, str] | None:
    """The kind of error and its text, the same on every rank; the text is empty if all is well.

    None when some rank has not come in time.
    """
    verdict, words = f"{prefix}.verdict", [f"{prefix}.{each}" for each in range(size)]
    word = json.dumps(facts)
    store.set(f"{words[rank]}.facts", word)
    store.set(words[rank], sha256(word.encode()).hexdigest())
    if store.add(f"{prefix}.present", 1) == size:
        text = ""
        if len({store.get(each) for each in words}) > 1:
            text = differences([json.loads(store.get(f"{each}.facts")) for each in words])
        said = store.compare_set(verdict, "", json.dumps(("ValueError", text)))
    elif _appears(store, verdict, timeout):
        said = store.get(verdict)
    else:
        return None
    kind, text = json.loads(said)
    if not text:
        store.set(f"{words[rank]}.facts", "")  # nobody will read it
    return kind, text


def _too_late(store: Store, prefix: str, call: str, size: int, timeout: float) -> tuple[str, str]:
    """The verdict where a rank stayed away, unless another has been given meanwhile."""
    missing = [rank for rank in range(size) if not store.check([f"{prefix}.{rank}"])]
    text = (
        f"{ranks_text(missing)} did not call {call} within {timeout:g} s of another rank: every "
        "rank of the model's process group must; if they only come late, raise `timeout`"
    )
    said = store.compare_set(f"{prefix}.verdict", "", json.dumps(("ExchangeError", text)))
    kind, text = json.loads(said)
    return kind, text


def _until_all_have_heard(store: Store, prefix: str, timeout: float) -> None:
    """Wait until every rank that came has its verdict: the store may end with this process."""
    heard, until, pause = store.add(f"{prefix}.heard", 1), monotonic() + timeout, Event()
    while heard < store.add(f"{prefix}.present", 0) and monotonic() < until:
        pause.wait(LONGEST_PAUSE / 10)
        heard = store.add(f"{prefix}.heard", 0)


def differences(everyone: list[dict[str, Any]]) -> str:
    """A sentence about the facts that are not the same on all ranks; empty if all are."""
    lines = []
    for name in dict.fromkeys(name for its in everyone for name in its):
        ranks: dict[str, list[int]] = {}
        for rank, its in enumerate(everyone):
            ranks.setdefault(_shown(its, name), []).append(rank)
        if len(ranks) > 1:
            first, *others = (f"{value} on {ranks_text(found)}" for value, found in ranks.items())
            lines.append(f"{name} is {first} but {', '.join(others[:SHOWN])}")
    if not lines:
        return ""
    more = f"; and {len(lines) - SHOWN} more differences" if len(lines) > SHOWN else ""
    return f"the ranks disagree: {'; '.join(lines[:SHOWN])}{more}"


def ranks_text(ranks: list[int]) -> str:
    """`rank 1`, or `ranks 1, 2, 3`: the first few, and how many more there are."""
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:SHOWN]))}{more}"


def _appears(store: Store, key: str, timeout: float) -> bool:
    """Wait for a key; whether it came in time. A loop, so that Ctrl-C is heard."""
    until, pause, look = monotonic() + timeout, Event(), 0.002
    while not store.check([key]):
        left = until - monotonic()
        if left <= 0:
            return False
        look = min(2 * look, LONGEST_PAUSE)
        pause.wait(min(look, left))
    return True


def _short(value: Any) -> Any:
    """Long values by their digest: it is enough to know whether they differ."""
    text = json.dumps(value)
    return value if len(text) <= 40 else f"{text[:20]}... {sha256(text.encode()).hexdigest()[:8]}"


def _shown(facts: dict[str, Any], name: str) -> str:
    return str(_short(facts[name])) if name in facts else "absent"
