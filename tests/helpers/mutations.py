# SPDX-License-Identifier: Apache-2.0
"""Files that went wrong: bytes and values changed at random, the same ones in every run."""

from __future__ import annotations

import copy
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ODD_BYTES = (
    b"",
    b"\0",
    b"\xff",
    b"\xc3(",
    b"9" * 400,
    b"[" * 3000,
    b"\n",
    b'"',
    b"{}",
    b"=",
    b"-1",
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, "", "text", "\udc80", "x" * 5000, [], [1], {}, {"a": 1}, {"a": {"a": None}}),
    *(0, -1, 7, 2**31, 2**63, 10**30, 10**400, 1e300, -1e-300, 0.5, "NaN", "1", "\0", "../x"),
)
ROOM = 2**31
"""Bytes of memory that a reader may take beyond what the process has."""


def damaged(content: bytes, seed: int) -> bytes:
    """Content with one to three places changed."""
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(content) + 1)
        until = min(len(content), at + chance.choice((0, 1, 1, 4, 40, len(content))))
        how = chance.randrange(4)
        if how == 0:
            content = content[:at]
        elif how == 1:
            content = content[:at] + chance.choice(ODD_BYTES) + content[until:]
        elif how == 2:
            content = content[:at] + chance.randbytes(until - at) + content[until:]
        else:
            content = content[:at] + content[at:until] * 2 + content[until:]
    return content


def odd(value: Any, seed: int) -> Any:
    """A nested value in which one to three leaves or branches are something else, or missing."""
    chance = random.Random(seed)
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return copy.deepcopy(chance.choice(ODD_VALUES))
        holder, key = chance.choice(places)
        if isinstance(holder, dict) and chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(chance.choice(ODD_VALUES))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        yield value, key
        yield from _places(value[key])


@contextmanager
def bounded_memory(room: int = ROOM):
    """No more address space than there is now and some: who asks for more has a MemoryError."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def only(allowed: type[BaseException] | tuple, act: Callable[[], object]) -> str | None:
    """What the one kind of error says, on one line; None when all is well. Others come out."""
    try:
        act()
    except allowed as error:
        text = str(error)
        assert text and "\n" not in text.partition("problems with the data:")[0], text
        return text
    return None
