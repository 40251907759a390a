# SPDX-License-Identifier: Apache-2.0
"""Registration: every rank writes its information to the store, and all read that of all ranks.

It also makes a second start with the same store safe. torchrun keeps its store when it restarts the
workers, and the keys of the earlier workers are still in it. So rank 0 opens a new round every
time, whose keys have a prefix of their own, and a rank trusts a round only if it finds its own
nonce there.
"""

# pyright: reportPrivateImportUsage=false
# torch documents its stores, but does not list them as exported

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist

from oktopk.comm.consistency import differences
from oktopk.errors import LaunchError
from oktopk.launch.rank_environment import RankEnvironment
from oktopk.launch.rank_info import RankInfo, local_rank_info

ROUND_KEY = "oktopk/round"
"""The key that holds the prefix of the current round."""
READ_SECONDS = 1.0
"""Time that the others get to read what is wrong, before rank 0 exits and its store with it."""
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Round:
    """What rank 0 collected: the same on every rank."""

    prefix: str
    ranks: list[RankInfo | None]
    """None for a rank that did not register in time."""

    problem: str
    """How the settings of the ranks differ; empty if they do not."""


def register(
    store: dist.Store, env: RankEnvironment, timeout: float, settings: Mapping[str, object]
) -> tuple[dist.Store, list[RankInfo]]:
    """Return a part of the store that only these ranks write to, and the information of each.

    Raises the same LaunchError on all ranks if `settings` differ, or if a rank does not register
    within `timeout` seconds.
    """
    mine = local_rank_info()
    try:
        take_part = _collect if env.rank == 0 else _announce
        found = take_part(store, env, mine, timeout, settings)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"{env}: the store of the job is gone, see rank 0: {reason}") from error
    if missing := [rank for rank, info in enumerate(found.ranks) if info is None]:
        raise LaunchError(f"{env}: ranks {missing} did not register within {timeout:g} s")
    if found.problem:
        raise LaunchError(found.problem)
    return dist.PrefixStore(found.prefix, store), [info for info in found.ranks if info is not None]


def _collect(
    store: dist.Store,
    env: RankEnvironment,
    mine: RankInfo,
    timeout: float,
    settings: Mapping[str, object],
) -> Round:
    """On rank 0: open a round, read what the other ranks announce, and publish the result."""
    prefix = f"oktopk/{mine.nonce}"
    store.set(ROUND_KEY, prefix)
    missing = {rank: f"{prefix}/{rank}" for rank in range(1, env.world_size)}
    ranks: list[RankInfo | None] = [mine, *(None for _ in missing)]
    given = {0: json.loads(json.dumps(dict(settings)))}  # as JSON returns it, like the others'
    deadline = time.monotonic() + timeout
    while missing and time.monotonic() < deadline:
        for rank in [rank for rank, key in missing.items() if store.check([key])]:
            info, given[rank] = json.loads(store.get(missing.pop(rank)))
            ranks[rank] = RankInfo(**info)
        time.sleep(POLL_SECONDS)
    # settings are compared here and not published: P ranks would read the settings of P ranks
    problem = _settings_problem([given[rank] for rank in sorted(given)])
    infos = [None if info is None else asdict(info) for info in ranks]
    store.set(f"{prefix}/ranks", json.dumps([infos, problem]))
    if missing or problem:
        time.sleep(READ_SECONDS)
    return Round(prefix, ranks, problem)


def _announce(
    store: dist.Store,
    env: RankEnvironment,
    mine: RankInfo,
    timeout: float,
    settings: Mapping[str, object],
) -> Round:
    """On other ranks: announce this rank in the current round until rank 0 has published it."""
    deadline, announced = time.monotonic() + timeout + READ_SECONDS, ""
    text = json.dumps([asdict(mine), dict(settings)])
    while time.monotonic() < deadline:
        prefix = store.get(ROUND_KEY).decode() if store.check([ROUND_KEY]) else ""
        if prefix != announced:
            store.set(f"{prefix}/{env.rank}", text)
            announced = prefix
        if prefix and store.check([f"{prefix}/ranks"]):
            infos, problem = json.loads(store.get(f"{prefix}/ranks"))
            ranks = [None if info is None else RankInfo(**info) for info in infos]
            own = ranks[env.rank] if env.rank < len(ranks) else None
            if own is not None and own.nonce == mine.nonce:  # else it is of an earlier start
                return Round(prefix, ranks, problem)
        time.sleep(POLL_SECONDS)
    raise LaunchError(f"{env}: rank 0 did not open the registration within {timeout:g} s")


def _settings_problem(settings: list[Mapping[str, object]]) -> str:
    """Describe how the settings of the ranks differ; empty if they do not."""
    found = differences(settings, range(len(settings)))
    if not found:
        return ""
    return f"the ranks were started with different settings: {found}. Give all ranks the same flags"
