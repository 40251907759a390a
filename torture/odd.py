# SPDX-License-Identifier: Apache-2.0
"""Odd values, texts, bytes and trees, drawn with a seed."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import torch

TEXTS = (
    *("", " ", "nan", "inf", "-inf", "-1", "0", "1e300", "1e-300", "0x10", "1_000", "+3", "1.5"),
    *("9" * 400, "9" * 5000, "-" + "9" * 400, "1e99999", "\u0663", "\u00b2", "\u221e", "\ufeff1"),
    *("true", "None", "a" * 10_000, "\x00", "\x1b[31m", "\U0001f600", "\udcff", "a\nb", "%s%n{0}"),
    *("[1]", "{}", "'", '"', "\\", ",", ",,", ":", "1:2:3", "1:", "0:0", "nan:1", "1:inf", "a=b"),
    *("4(x99999999999)", "4(x2),3", "4(x", "1(x0)", "node[1-3]", "n[[1]]", "[", "]", "node[1-3"),
    *("1gbit", "0gbit", "1e3gbit", "-1mbit", "1 gbit", "\u0661gbit", "1gbit,none", "none"),
    *("dense", "topka", "oktopk", "auto", "/dev/null", "/proc/x", ".", "x" * 300, "--", "-x"),
)

VALUES: tuple[Callable[[], Any], ...] = (
    *(
        lambda v=v: v
        for v in (None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, -(10**400))
    ),
    *(lambda v=v: v for v in (math.nan, math.inf, -math.inf, 1e300, -1e300, 5e-324, 0.5, 1 + 2j)),
    *(lambda v=v: v for v in ("", "nan", "x" * 5000, "\x00", "\udcff", b"", b"\xff", ...)),
    *(lambda v=v: v for v in ((), (1,), (1, 2), ((1, 0.5),), ((0, 2),), (("a", 0.5),), range(3))),
    *(list, dict, set, object, lambda: [1, "a"], lambda: {"a": 1}, lambda: {1: None}),
    *(lambda: [[[]]], lambda: print, lambda: int, lambda: Decimal("0.5"), lambda: Fraction(1, 2)),
    *(lambda: np.float32(0.5), lambda: np.int64(3), lambda: np.array([1, 2]), lambda: np.nan),
    *(lambda: torch.tensor(0.5), lambda: torch.tensor(3), lambda: torch.ones(3)),
    *(lambda: torch.tensor(math.nan), lambda: torch.empty(0), lambda: torch.ones(2, 2).to_sparse()),
    *(lambda: torch.ones(3, dtype=torch.complex64), lambda: torch.ones(3, device="meta")),
    *(lambda: torch.ones(3, dtype=torch.bool), lambda: torch.ones(3, dtype=torch.float64)),
)


def text(rng: Random) -> str:
    drawn = rng.choice(TEXTS)
    if rng.random() < 0.2:
        drawn = drawn + rng.choice(TEXTS)
    return drawn


def value(rng: Random) -> Any:
    return text(rng) if rng.random() < 0.15 else rng.choice(VALUES)()


def plain(rng: Random) -> Any:
    """A value that JSON and TOML can hold."""
    while True:
        drawn = value(rng)
        if rng.random() < 0.05:
            drawn = json.loads("[" * 400 + "]" * 400)
        if isinstance(drawn, (type(None), bool, int, float, str, list, dict)):
            try:
                json.dumps(drawn)
            except (TypeError, ValueError):
                continue
            return drawn


def spoilt(rng: Random, data: bytes) -> bytes:
    """The bytes with one to three things done to them."""
    for _ in range(rng.randint(1, 3)):
        data = rng.choice(SPOILS)(rng, data)
    return data


def _spot(rng: Random, data: bytes) -> int:
    # headers are where meaning is
    return (
        rng.randrange(min(len(data), 64) + 1) if rng.random() < 0.4 else rng.randint(0, len(data))
    )


def _insert(rng: Random, data: bytes, new: bytes) -> bytes:
    at = _spot(rng, data)
    return data[:at] + new + data[at:]


def _replace(rng: Random, data: bytes) -> bytes:
    at, new = _spot(rng, data), rng.randbytes(rng.randint(1, 9))
    return data[:at] + new + data[at + len(new) :]


def _number(rng: Random, data: bytes) -> bytes:
    """A digit becomes a huge number."""
    digits = [i for i, byte in enumerate(data[:20_000]) if 48 <= byte <= 57]
    if not digits:
        return data
    at = rng.choice(digits)
    return (
        data[:at] + rng.choice((b"9" * 30, b"-1", b"1e999", b"9" * 5000, b"NaN")) + data[at + 1 :]
    )


SPOILS: tuple[Callable[[Random, bytes], bytes], ...] = (
    lambda rng, data: data[: _spot(rng, data)],
    lambda rng, data: data[_spot(rng, data) :],
    lambda rng, data: _insert(rng, data, rng.randbytes(rng.randint(1, 9))),
    lambda rng, data: _insert(rng, data, b"\xff\xfe"),
    lambda rng, data: _insert(rng, data, bytes(rng.randint(1, 99))),
    lambda rng, data: _insert(rng, data, text(rng).encode("utf-8", "surrogateescape")),
    lambda rng, data: _insert(rng, data, rng.choice((b"[" * 5000, b'{"a":' * 5000, b"\n" * 99))),
    lambda rng, data: data + data[_spot(rng, data) :],
    lambda rng, data: rng.randbytes(rng.randint(0, 99)),
    lambda rng, data: b"",
    _replace,
    _replace,
    _number,
    _number,
)


def changed(rng: Random, tree: Any, draw: Callable[[Random], Any] = value) -> tuple[Any, str]:
    """A copy of nested dicts and lists with one node replaced, deleted, doubled or renamed."""
    tree = copy.deepcopy(tree)
    if not isinstance(tree, (dict, list)) or not tree or rng.random() < 0.03:
        new = draw(rng)
        return new, f"all of it is {new!r}"
    node, path = tree, ""
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        inner, path = node[key], f"{path}[{key!r}]"
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.25:
            break
        node = inner
    how = rng.choice(("replace", "replace", "replace", "delete", "rename", "wrap", "double"))
    if how == "replace":
        node[key] = _like(rng, inner) if rng.random() < 0.3 else draw(rng)
        return tree, f"{path} is {node[key]!r}"
    if how == "wrap":
        node[key] = [inner]
    elif isinstance(node, list):
        node[key : key + 1] = [] if how == "delete" else [inner, inner]
    else:
        del node[key]
        if how in ("rename", "double"):
            node[f"{key}x"] = inner
    return tree, f"{how} {path}"


def _like(rng: Random, inner: Any) -> Any:
    """Another value of the same type."""
    if isinstance(inner, torch.Tensor):
        flat = inner.flatten()
        return rng.choice((inner.double(), flat, flat[:1], inner * math.nan, inner.long()))
    if isinstance(inner, str):
        return text(rng)
    number = rng.choice((-1, 0, 2**40, 10**30))
    return type(inner)(number) if isinstance(inner, (int, float)) else number
