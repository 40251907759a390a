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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oktopk.errors import LaunchError
from oktopk.launch.rank_environment import Place

Word = dict[str, Any]
Signed = list[Word]
Page = tuple[str, list[Word | None], str]
"""Its name, what every rank said (None: it did not come), and what is wrong, if anything is."""
HEARD_SECONDS = 1.0
"""What the others have to hear who is missing, before rank 0 leaves and its store with it."""
SHOWN = 8  # ranks and values that a message names


def sign_in(
    store: dist.Store, place: Place, timeout: float, alike: Mapping[str, Any]
) -> tuple[dist.Store, Signed]:
    """A page of the store that only these ranks write on, and what each said of itself.

    If `alike` is not the same on all ranks, all of them raise the same LaunchError.
    """
    mine = _word() | {"alike": dict(alike)}
    try:
        call = _gather_words if place.rank == 0 else _answer
        page, words, complaint = call(store, mine, place, timeout)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"{place}: the store of the job is gone, see rank 0: {reason}") from error
    if missing := [rank for rank, word in enumerate(words) if word is None]:
        raise LaunchError(f"{place}: ranks {missing} did not come within {timeout:g} s")
    if complaint:
        raise LaunchError(complaint)
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
    # compared here and not sent on: P ranks would read the flags of P ranks
    complaint = disagreement([word.pop("alike") for word in words if word is not None])
    store.set(f"{page}/signed", json.dumps([words, complaint]))
    if missing or complaint:
        time.sleep(HEARD_SECONDS)
    return page, words, complaint


def _answer(store: dist.Store, mine: Word, place: Place, timeout: float) -> Page:
    """Say one's word on the page that is open, until it is read out."""
    deadline, answered = time.monotonic() + timeout + HEARD_SECONDS, ""
    while time.monotonic() < deadline:
        page = store.get("oktopk/page").decode() if store.check(["oktopk/page"]) else ""
        if page != answered:
            store.set(f"{page}/{place.rank}", json.dumps(mine))
            answered = page
        if page and store.check([f"{page}/signed"]):
            words, complaint = json.loads(store.get(f"{page}/signed"))
            own = words[place.rank] if place.rank < len(words) else None
            if own and own["word"] == mine["word"]:  # else it is of an earlier life
                return page, words, complaint
        time.sleep(0.02)
    raise LaunchError(f"{place}: rank 0 did not open the list within {timeout:g} s")


def disagreement(settings: list[dict[str, Any]]) -> str:
    """What differs between the settings of the ranks and on which; empty if nothing does."""
    lines = []
    for name in dict.fromkeys(name for mine in settings for name in mine):
        ranks: dict[str, list[int]] = {}
        for rank, mine in enumerate(settings):
            ranks.setdefault(json.dumps(mine[name]) if name in mine else "not set", []).append(rank)
        if len(ranks) > 1:
            shown = [f"{value} on {_named(its)}" for value, its in ranks.items()]
            lines.append(f"{name} is {', '.join(shown[:SHOWN])}{', ...' * (len(shown) > SHOWN)}")
    if not lines:
        return ""
    return f"the ranks were not started alike: {'; '.join(lines)}. Give all of them the same flags"


def _named(ranks: list[int]) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:SHOWN]))}{more}"


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
