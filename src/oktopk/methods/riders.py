"""Riders: values that must arrive whole, carried along in the messages of a sparse exchange.

Biases, norms and tiny tensors are not worth indices, nor a round trip of their own. Their values
are appended to the rows that travel anyway: a share for each rank on the way in, the summed shares
on the way out. Where there are no riders nothing is copied.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from oktopk import wire


def num_rows(num_values: int, dtype: torch.dtype) -> int:
    """Rows that `num_values` riders fill."""
    words = wire.words_per_value(dtype)
    return -(-num_values * words // (1 + words))


def to_rows(values: Tensor) -> Tensor:
    """(parts, values) as (parts, rows, words of a row), zeros at the end."""
    words = wire.words_per_value(values.dtype)
    parts, num = values.shape
    rows = torch.zeros(
        parts, num_rows(num, values.dtype), 1 + words, dtype=torch.int32, device=values.device
    )
    rows.view(parts, -1)[:, : num * words] = values.contiguous().view(torch.int32).view(parts, -1)
    return rows


def to_values(rows: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_rows`: (parts, rows, words) back to (parts, values)."""
    words = wire.words_per_value(dtype)
    if not num:
        return torch.empty(len(rows), 0, dtype=dtype, device=rows.device)
    flat = rows.reshape(len(rows), -1)[:, : num * words]
    return flat.clone(memory_format=torch.contiguous_format).view(dtype)


def in_rank_order(parts: Tensor) -> Tensor:
    """The sum over the first dimension, in its order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def board(rows: Tensor, splits: list[int], riders: Tensor) -> tuple[Tensor, list[int]]:
    """Append riders[p] to the p-th run of rows."""
    num = riders.shape[1]
    if not num:
        return rows, splits
    runs = rows.split(splits)
    mixed = [part for pair in zip(runs, riders, strict=True) for part in pair]
    return torch.cat(mixed), [split + num for split in splits]


def alight(rows: Tensor, splits: list[int], num: int) -> tuple[Tensor, list[int], Tensor]:
    """Take the last `num` rows off every run: the runs without them, their lengths, the riders."""
    if not num:
        return rows, splits, rows.new_empty(len(splits), 0, rows.shape[1])
    ends = list(accumulate(splits))
    lengths = [split - num for split in splits]
    runs = [rows[end - num - length : end - num] for end, length in zip(ends, lengths, strict=True)]
    return torch.cat(runs), lengths, torch.stack([rows[end - num : end] for end in ends])
