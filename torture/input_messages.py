# SPDX-License-Identifier: Apache-2.0
"""Damaged messages of every codec: refused, or read as one that some rank could have sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from oktopk import kernels, wire
from oktopk.sparse import Sparse
from oktopk.wire import CODECS, CodecName, EntryRange, allocate_entries, is_possible
from torture.desk import Desk, Input, LostError

WIDTHS = (1, 33, 100, 2000, 9000)
BIT_31 = -(2**31)


def damaged_message(desk: Desk) -> Input:
    """One message whose words or sizes were changed; read and summed as an exchange does it."""
    rng = desk.rng
    name, dtype = rng.choice(list(CODECS)), rng.choice((torch.float32, torch.float64))
    width = rng.choice(WIDTHS)
    lo = rng.choice((0, 7, 2**31 - 1 - width))
    count = min(width, rng.choice((1, 3, 64, 65, 200, 300)))
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    indices = torch.randperm(width, generator=generator)[:count].sort().values.int() + lo
    values = torch.randn(count, generator=generator, dtype=dtype)
    dense = torch.randn(rng.choice((0, 0, 5)), generator=generator, dtype=dtype)
    entries = EntryRange(count, lo, lo + width)
    words, _, told = wire.write_message(indices, values, entries, name, dense)
    what, words, told = _damaged(rng, words, told)
    what = f"{name}, {dtype}, {count} of {width} from {lo}: {what}"
    return Input(what, lambda: read(words, told, name, dense), ())


def _damaged(rng: Random, words: Tensor, told: EntryRange) -> tuple[str, Tensor, EntryRange]:
    if rng.random() < 0.2:
        told = rng.choice(SIZES)(rng, told)
        return f"told {told}", words, told
    words = words.clone()
    for _ in range(rng.choice((1, 1, 2, 9))):
        rng.choice(SPOILS)(rng, words)
    return "other words", words, told


def _flip(rng: Random, words: Tensor) -> None:
    bit = rng.randrange(32)
    words[rng.randrange(len(words))] ^= BIT_31 if bit == 31 else 1 << bit


def _overwrite(rng: Random, words: Tensor) -> None:
    words[rng.randrange(len(words))] = rng.choice((0, -1, 1, BIT_31, rng.randrange(2**31)))


def _swap(rng: Random, words: Tensor) -> None:
    places = [rng.randrange(len(words)) for _ in range(2)]
    words[places] = words[places[::-1]].clone()


def _fill(rng: Random, words: Tensor) -> None:
    start, end = sorted(rng.randint(0, len(words)) for _ in range(2))
    words[start:end] = rng.choice((0, -1, rng.randrange(2**31)))


SPOILS: tuple[Callable[[Random, Tensor], None], ...] = (_flip, _flip, _overwrite, _swap, _fill)


def _other_count(rng: Random, told: EntryRange) -> EntryRange:
    most = told.hi - told.lo
    return replace(told, count=rng.choice((0, told.count + 1, told.count // 2, most, 2**31 - 1)))


def _other_words(rng: Random, told: EntryRange) -> EntryRange:
    had = told.num_index_words
    if had is None:
        return _other_count(rng, told)
    others = 0, 1, max(had - 1, 0), had + 1, 2 * had, 2**31 - 1
    return replace(told, num_index_words=rng.choice(others))


SIZES: tuple[Callable[[Random, EntryRange], EntryRange], ...] = (_other_count, _other_words)


def read(words: Tensor, told: EntryRange, name: CodecName, dense: Tensor) -> bool:
    """Read a message as the receiver of an exchange does; whether it was accepted.

    What is accepted must be as an exchange relies on it, and its sum that of plain arithmetic.
    """
    if not is_possible(told, name, dense.dtype):
        return False
    size = wire.message_words(told, name, dense.dtype, len(dense))
    received = words.repeat(-(-size // max(len(words), 1)))[:size].clone()  # as many as were told
    indices, _, values, _ = allocate_entries([told], dense)
    _, is_sound = wire.read_message(received, told, name, indices, values)
    if not is_sound:
        return False
    found = indices.tolist()
    if found != sorted(set(found)) or (found and not told.lo <= found[0] <= found[-1] < told.hi):
        raise LostError(f"indices were accepted that do not ascend in their range: {found[:9]}")
    _sum_up(indices, values, told)
    return True


def _sum_up(indices: Tensor, values: Tensor, told: EntryRange) -> None:
    """The sum with itself by the kernel is that of dense vectors, and is applied within bounds."""
    lo, width = told.lo, told.hi - told.lo
    twice = torch.cat([indices, indices]), torch.cat([values, values])
    merged = kernels.merge(*twice, [told.count, told.count], lo, told.hi)
    dense = values.new_zeros(width)
    dense[indices.long() - lo] = values + values
    if not merged.indices.equal(indices) or not torch.equal(
        merged.values.nan_to_num(), dense[indices.long() - lo].nan_to_num()
    ):
        raise LostError("the sum of two messages is another one")
    grad, residual = torch.empty_like(dense), torch.zeros_like(dense)
    local = Sparse(indices, values, told.hi)
    kernels.apply_result_(grad, residual, merged, local, 2, 1.0, lo)


KINDS: dict[str, Callable[[Desk], Input]] = {"message": damaged_message}


def read_many(number: int, seed: int) -> dict[str, int]:
    """Read so many messages in this process: how many of each codec were refused."""
    refused = dict.fromkeys(CODECS, 0)
    nowhere: Any = None
    for each in range(number):
        one = damaged_message(Desk(Random(f"message/{seed + each}"), nowhere, nowhere))
        refused[one.what.split(",")[0]] += not one.call()
    return refused
