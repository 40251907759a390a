# SPDX-License-Identifier: Apache-2.0
"""Messages: selected entries, and values that travel dense behind them.

Biases, norms and tiny tensors are not worth indices, nor a message of their own. All of their
values travel, in their own dtype and exactly, at the end of the messages of the sparse exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from oktopk.wire import codec
from oktopk.wire.codec import CodecName, Encoded, EntryRange


class Message(NamedTuple):
    """The decoded content of one message, or of several."""

    indices: Tensor
    values: Tensor
    dense_part: Tensor
    """The values that travel dense behind the entries."""


Expect = Callable[[Tensor, int], None]
"""Called with whether a message is sound, as `codec.decode` tells it, and the rank that sent it."""


def num_words(
    entries: EntryRange, codec_name: CodecName, dtype: torch.dtype, num_dense: int
) -> int:
    """The size of a message in words, as sender and receiver compute it."""
    return codec.num_words(entries, codec_name, dtype) + num_dense * codec.words_per_value(dtype)


def write(
    indices: Tensor, values: Tensor, entries: EntryRange, codec_name: CodecName, dense_part: Tensor
) -> Encoded:
    """Encode a message. O(count)."""
    encoded = codec.encode(indices, values, entries, codec_name)
    words = torch.cat([encoded.words, dense_part.contiguous().view(torch.int32)])
    return encoded._replace(words=words)


def read(
    words: Tensor, entries: EntryRange, codec_name: CodecName, indices: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Decode a message: fill `indices` and `values`. O(count).

    Returns its dense part, and whether its entries are sound, as `codec.decode` does.
    """
    num_entry_words = codec.num_words(entries, codec_name, values.dtype)
    is_sound = codec.decode(words[:num_entry_words], entries, codec_name, indices, values)
    # the copy is aligned for float64, which may start at an odd word here
    return words[num_entry_words:].clone().view(values.dtype), is_sound


def read_all(
    received: dict[int, Tensor],
    ranges: list[EntryRange],
    codec_name: CodecName,
    own: Message,
    expect: Expect,
) -> Message:
    """Decode one message of every rank: all entries in rank order, and the sum of the dense parts.

    `own` is what this rank, from which nothing was received, would have sent to itself. The sum is
    taken in rank order, so it has the same bits wherever it is computed.
    """
    indices, index_parts, values, value_parts = codec.allocate_entries(ranges, own.values)
    dense_parts = []
    for peer, entries in enumerate(ranges):
        if peer not in received:
            index_parts[peer].copy_(own.indices)
            value_parts[peer].copy_(own.values)
            dense_parts.append(own.dense_part)
        else:
            parts = index_parts[peer], value_parts[peer]
            dense_part, is_sound = read(received[peer], entries, codec_name, *parts)
            expect(is_sound, peer)
            dense_parts.append(dense_part)
    return Message(indices, values, _sum_in_order(dense_parts))


def _sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
