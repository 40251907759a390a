"""Signing in: every rank says what it has, and all know it before the group is made.

It is also what makes a second start at the same store safe. torchrun keeps its store when it
restarts the workers, and the addresses of the dead are still in it; so rank 0 opens a new page
every time, and a rank takes a page for its own only when it finds its own word there.
"""

# pyright: reportPrivateImportUsage=false
# torch documents its stores, but does not list them as exported

from __future__ import annotations

import json
import os
import secrets
import socket
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oktopk.place import LaunchError, Place

Word = dict[str, Any]
Signed = list[Word]
Page = tuple[str, list[Word | None]]
HEARD_SECONDS = 1.0
"""What the others have to hear who is missing, before rank 0 leaves and its store with it."""


def sign_in(store: dist.Store, place: Place, timeout: float) -> tuple[dist.Store, Signed]:
    """A page of the store that only these ranks write on, and what each said of itself."""
    mine = _word()
    try:
        call = _gather_words if place.rank == 0 else _answer
        page, words = call(store, mine, place, timeout)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"{place}: the store of the job is gone, see rank 0: {reason}") from error
    if missing := [rank for rank, word in enumerate(words) if word is None]:
        raise LaunchError(f"{place}: ranks {missing} did not come within {timeout:g} s")
    return dist.PrefixStore(page, store), [word for word in words if word is not None]


def _word() -> Word:
    """What a rank says of itself; the word is how it knows its own."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "word": secrets.token_hex(8),
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        "gpus": [str(torch.cuda.get_device_properties(index).uuid) for index in range(gpus)],
    }


def _gather_words(store: dist.Store, mine: Word, place: Place, timeout: float) -> Page:
    """Open a page, and write on it what every rank said; None of those that did not come."""
    page = f"oktopk/{mine['word']}"
    store.set("oktopk/page", page)
    missing = {rank: f"{page}/{rank}" for rank in range(1, place.size)}
    words: list[Word | None] = [mine, *(None for _ in missing)]
    deadline = time.monotonic() + timeout
    while missing and time.monotonic() < deadline:
        for rank in [rank for rank, key in missing.items() if store.check([key])]:
            words[rank] = json.loads(store.get(missing.pop(rank)))
        time.sleep(0.02)
    store.set(f"{page}/signed", json.dumps(words))
    if missing:
        time.sleep(HEARD_SECONDS)
    return page, words


def _answer(store: dist.Store, mine: Word, place: Place, timeout: float) -> Page:
    """Say one's word on the page that is open, until it is read out."""
    deadline, answered = time.monotonic() + timeout + HEARD_SECONDS, ""
    while time.monotonic() < deadline:
        page = store.get("oktopk/page").decode() if store.check(["oktopk/page"]) else ""
        if page != answered:
            store.set(f"{page}/{place.rank}", json.dumps(mine))
            answered = page
        if page and store.check([f"{page}/signed"]):
            words = json.loads(store.get(f"{page}/signed"))
            if words[place.rank : place.rank + 1] == [mine]:  # else it is of an earlier life
                return page, words
        time.sleep(0.02)
    raise LaunchError(f"{place}: rank 0 did not open the list within {timeout:g} s")


def device_of(place: Place, signed: Signed) -> torch.device:
    """This rank's GPU if every rank has one of its own, else the CPU; the same on all ranks."""
    seen = [bool(word["gpus"]) for word in signed]
    own = [_own_gpu(rank, signed) for rank in range(place.size)]
    if (
        None not in own
        and len(set(zip([w["host"] for w in signed], own, strict=True))) == place.size
    ):
        return torch.device("cuda", signed[place.rank]["gpus"].index(own[place.rank]))
    if any(seen) and place.rank == 0:
        warnings.warn(
            f"{sum(seen)} of {place.size} ranks see a GPU, but not one each: all run on CPUs",
            stacklevel=2,
        )
    return torch.device("cpu")


def _own_gpu(rank: int, signed: Signed) -> str | None:
    """The only GPU a launcher left visible, or that of the rank's number on its host."""
    gpus = signed[rank]["gpus"]
    local = sum(word["host"] == signed[rank]["host"] for word in signed[:rank])
    return gpus[0] if len(gpus) == 1 else gpus[local] if local < len(gpus) else None


def threads(rank: int, signed: Signed) -> int:
    """Cores per rank: a core that several ranks of a host may use is shared out among them."""
    mine = signed[rank]
    here = [word for word in signed if word["host"] == mine["host"]]
    claims = Counter(core for word in here for core in word["cores"])
    share = sum(1 / claims[core] for core in mine["cores"])
    return max(1, int(min(share, _quota() / len(here)) + 1e-6))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Cores that a container may use, whatever it sees."""
    if not path.exists():
        return float("inf")
    limit, period = path.read_text().split()
    return float("inf") if limit == "max" else int(limit) / int(period)
