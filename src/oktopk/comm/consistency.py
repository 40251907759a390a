# SPDX-License-Identifier: Apache-2.0
"""What ranks compare, so that all of them raise where one would: settings, replicas, saved
states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from threading import Event
from time import monotonic
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from oktopk.comm.communicator import Comm
from oktopk.errors import ExchangeError, ReplicaError

# The key-value store that the ranks of a process group share.


class Store(Protocol):
    """The methods of `torch.distributed.Store` that this project calls."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


# Consistency checks: all ranks compare what they are about to do; where it differs, all raise.
#
# `attach` compares through the store of the process group, before any collective. A rank that has
# another dtype or method, or that does not attach at all, would otherwise send messages of another
# size than its peers expect, and gloo then ends the process. What is known only at the first step
# (the state that was loaded, the dtype of the gradients) is compared by a collective with a header
# of fixed size.
#
# Ranks compare named values that JSON can hold: numbers, strings, and lists of them.


HEADER_BYTES = 1024  # for a rank's values as JSON
PROTOCOL = 1  # version of the messages between ranks; raise it whenever they change
MAX_SHOWN = 8  # ranks, and differences, that an error lists
MAX_POLL_SECONDS = 0.2  # between two looks at the store
MAX_STAY_SECONDS = 5.0  # that a rank which must raise waits until the others have read why


def check_consistency(comm: Comm, device: torch.device, values: Mapping[str, object]) -> None:
    """Raise ValueError on every rank if a value differs between ranks. Header: 1024 bytes."""
    text = json.dumps({name: _shortened(value) for name, value in values.items()}).encode()
    assert len(text) <= HEADER_BYTES, text
    mine = torch.tensor(list(text.ljust(HEADER_BYTES)), dtype=torch.uint8, device=device)
    rows = comm.all_gather_header(mine, stage="handshake")
    everyone = [_read_values(comm, peer, bytes(row)) for peer, row in enumerate(rows.tolist())]
    if found := differences(everyone, comm.global_ranks):
        raise ValueError(f"the ranks disagree: {found}")


def _read_values(comm: Comm, peer: int, row: bytes) -> dict[str, object]:
    values: dict[str, object] = {}
    try:
        values.update(json.loads(row))
    except (TypeError, ValueError):
        comm.expect(False, peer)
    return values


def check_consistency_through_store(
    open_store: Callable[[], Store],
    rank: int,
    ranks: Sequence[int],
    timeout: float,
    values: Mapping[str, object],
    call: str = "attach",
    prefix: str = "oktopk.attach",
) -> str:
    """Compare values without a collective; raise ValueError on every rank if one differs.

    `rank` and `ranks`, all that take part, are numbers in the job. `prefix` is for the keys in the
    store and must be the same on all ranks. The result is the prefix of this comparison, which no
    other one has.

    Raises ExchangeError with the ranks that have not made the same `call` within `timeout` seconds.
    The rank that arrives last reads a digest of each rank's values, and the values only if digests
    differ; the others wait for its outcome. The first outcome that is written counts for all ranks,
    so a rank that arrives too late gets the same error.
    """
    try:
        store = open_store()
        # every rank counts its own calls, and all make the same calls: equal numbers are one call
        prefix = f"{prefix}.{store.add(f'{prefix}.{rank}', 1)}"
        found = _outcome(store, prefix, rank, ranks, timeout, values)
        kind, text = found if found is not None else _too_late(store, prefix, call, ranks, timeout)
    except RuntimeError as error:  # of torch's store
        raise ExchangeError(
            f"rank {rank}: the store of the process group does not answer, so the ranks could not "
            f"compare their settings; it usually lives in rank 0 of the job, look there ({error})"
        ) from error
    if text:
        with suppress(RuntimeError):  # the store is gone: no rank can read it any more
            _wait_until_all_have_read(store, prefix, min(timeout, MAX_STAY_SECONDS))
        raise (ValueError if kind == "ValueError" else ExchangeError)(text)
    return prefix


def _outcome(
    store: Store,
    prefix: str,
    rank: int,
    ranks: Sequence[int],
    timeout: float,
    values: Mapping[str, object],
) -> tuple[str, str] | None:
    """Return the type and the text of the error, the same on every rank; no text if all agree.

    None means that a rank did not arrive in time.
    """
    outcome_key, keys = f"{prefix}.outcome", {each: f"{prefix}.{each}" for each in ranks}
    text = json.dumps(dict(values))
    store.set(f"{keys[rank]}.values", text)
    store.set(keys[rank], sha256(text.encode()).hexdigest())
    if store.add(f"{prefix}.arrived", 1) == len(keys):
        problem = ""
        if len({store.get(key) for key in keys.values()}) > 1:
            everyone = [json.loads(store.get(f"{key}.values")) for key in keys.values()]
            found = differences(everyone, ranks)
            problem = f"the ranks disagree: {found}"
        written = store.compare_set(outcome_key, "", json.dumps(("ValueError", problem)))
    elif _wait_for(store, outcome_key, timeout):
        written = store.get(outcome_key)
    else:
        return None
    kind, problem = json.loads(written)
    if not problem:
        store.set(f"{keys[rank]}.values", "")  # no rank will read it
    return kind, problem


def _too_late(
    store: Store, prefix: str, call: str, ranks: Sequence[int], timeout: float
) -> tuple[str, str]:
    """Return the outcome where a rank is missing, unless another one has been written meanwhile."""
    missing = [rank for rank in ranks if not store.check([f"{prefix}.{rank}"])]
    text = (
        f"{ranks_text(missing)} did not call {call} within {timeout:g} s of another rank: every "
        "rank of the model's process group must; if they are only late, raise `timeout`"
    )
    written = store.compare_set(f"{prefix}.outcome", "", json.dumps(("ExchangeError", text)))
    kind, text = json.loads(written)
    return kind, text


def _wait_until_all_have_read(store: Store, prefix: str, timeout: float) -> None:
    """Wait until every rank that arrived has the outcome: the store may end with this process."""
    num_read, deadline, pause = store.add(f"{prefix}.read", 1), monotonic() + timeout, Event()
    while num_read < store.add(f"{prefix}.arrived", 0) and monotonic() < deadline:
        pause.wait(MAX_POLL_SECONDS / 10)
        num_read = store.add(f"{prefix}.read", 0)


def differences(values: Sequence[Mapping[str, object]], ranks: Sequence[int]) -> str:
    """Describe the values that are not the same on all ranks; empty if all are the same."""
    lines = []
    for name in dict.fromkeys(name for mine in values for name in mine):
        found: dict[str, list[int]] = {}
        for rank, mine in zip(ranks, values, strict=True):
            text = str(_shortened(mine[name])) if name in mine else "not set"
            found.setdefault(text, []).append(rank)
        if len(found) > 1:
            first, *others = (f"{text} on {ranks_text(having)}" for text, having in found.items())
            lines.append(f"{name} is {first} but {', '.join(others[:MAX_SHOWN])}")
    more = f"; and {len(lines) - MAX_SHOWN} more differences" if len(lines) > MAX_SHOWN else ""
    return "; ".join(lines[:MAX_SHOWN]) + more


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 1`, or `ranks 1, 2, 3`: the first few, and how many more there are."""
    more = f" and {len(ranks) - MAX_SHOWN} more" if len(ranks) > MAX_SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MAX_SHOWN]))}{more}"


def _wait_for(store: Store, key: str, timeout: float) -> bool:
    """Wait for a key; whether it was set in time. It polls, so that Ctrl-C interrupts it."""
    deadline, pause, seconds = monotonic() + timeout, Event(), 0.002
    while not store.check([key]):
        left = deadline - monotonic()
        if left <= 0:
            return False
        seconds = min(2 * seconds, MAX_POLL_SECONDS)
        pause.wait(min(seconds, left))
    return True


def _shortened(value: object) -> object:
    """Replace a long value by its beginning and a digest, which still differ if the value does."""
    text = json.dumps(value)
    return value if len(text) <= 40 else f"{text[:20]}... {sha256(text.encode()).hexdigest()[:8]}"


# A cheap check that all ranks hold the same weights.
#
# Buffers are not compared. DDP usually broadcasts those of rank 0 before each forward, so a
# difference does not last. With `broadcast_buffers=False`, and for running statistics between two
# forward passes or two exchanges of local steps, a difference is correct.


INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AFTER_JOIN = (
    "; there was a join before, and DDP then copies the weights of the last rank to the others but "
    "not the state of its optimizer (momentum): copy that too, as docs/guides/ddp.md shows"
)
BLOCK = 1 << 16  # values multiplied at once
ODD = -0x61C8864680B583EB  # 2^64 over the golden ratio, as int64: its multiples look random


@cache
def _factors(device: torch.device) -> Tensor:
    """Return a different odd factor for every place in a block, so that swapped values are seen."""
    mixed = torch.arange(1, BLOCK + 1, device=device) * ODD
    return (mixed ^ (mixed >> 29)) | 1


def checksum(x: Tensor) -> Tensor:
    """Return a hash of the bits of x in their order, modulo 2^64. One read, 1 MB of scratch."""
    bits = x.detach().reshape(-1).view(INTEGER[x.element_size()])
    total, factors = bits.new_zeros((), dtype=torch.int64), _factors(x.device)
    for block in bits.split(BLOCK):
        total = total * ODD + (block * factors[: len(block)]).sum()
    return total


def check_replicas(
    parameters: dict[str, Tensor],
    comm: Comm,
    step: int,
    *,
    joined: bool = False,
    has_joined: bool = False,
) -> None:
    """Raise ReplicaError on every rank if weights differ, with the first tensor and the ranks.

    One read of the weights, and a header of 8 bytes per tensor and 2 more words. A rank that has
    `joined` ran out of data inside `DistributedDataParallel.join`. It does not step its optimizer,
    so its weights are not compared until DDP overwrites them at the end of the join. `has_joined`
    tells that this happened before; the error then explains what may be the cause.
    """
    if not parameters:
        return
    sums = [checksum(parameter) for parameter in parameters.values()]
    flags = sums[0].new_tensor([joined, has_joined])
    everyone = comm.all_gather_header(torch.cat([torch.stack(sums), flags]), stage="weights").cpu()
    active = (everyone[:, -2] == 0).nonzero().view(-1)
    differs = everyone[active] != everyone[active[:1]]
    for column, name in enumerate(parameters):
        others = [comm.global_ranks[rank] for rank in active[differs[:, column]].tolist()]
        if others:
            raise ReplicaError(
                f"rank {comm.global_rank}, step {step}: the weights of {name!r} differ "
                f"between rank {comm.global_ranks[int(active[0])]} and {ranks_text(others)}"
                + (AFTER_JOIN if everyone[:, -1].any() else "")
            )


# The newest of what all ranks have, where each of them found some of it in files.


LAST = 8
"""How many a rank tells of: older ones are not looked for."""

Numbers = TypeVar("Numbers", bound=tuple[int, ...])


def newest_on_all(
    found: Iterable[Numbers], width: int, comm: Comm, device: torch.device
) -> Numbers | None:
    """The largest tuple that every rank has found; None if there is none. Collective.

    All tuples have `width` numbers, none of which is -2. Header: 64 bytes for each of them.
    """
    nothing = (-2,) * width
    newest = sorted(found)[-LAST:]
    table = torch.tensor([*newest, *[nothing] * (LAST - len(newest))], dtype=torch.int64)
    heard = comm.all_gather_header(table.to(device), stage="checkpoint").tolist()
    common = set.intersection(*({tuple(row) for row in rows} for rows in heard))
    return max((each for each in newest if each in common), default=None)
