# SPDX-License-Identifier: Apache-2.0
"""Codecs: a table of the ways in which selected entries are written as words of 32 bits.

A codec is a value codec and an index codec, chosen independently. To add one, write its value codec
in `values.py` or its index codec in `indices.py`; then add a name to `CodecName` and a row to
`CODECS`. Settings, configuration files and options take their choices from `CodecName`.

Sender and receiver both know how many entries a message has and in which index range they lie
(`EntryRange`). With most codecs the size of the entries follows from that alone, whatever they are.
So no size has to be sent beside the counts, which are sent anyway. Where indices are coded by Rice,
their size is sent with the counts (`sizes_to_tell`).

A receiver trusts neither: sizes that no message has are refused before memory is allocated for them
(`is_possible`), and decoding tells whether the indices ascend within their range (`decode`). What
passes is a message that some rank could have sent. Bits that were flipped in a value, or that make
another ascending list of indices, are for the checksums of the network to find.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.wire.indices import EliasFano, IndexCodec, Int32, Rice
from oktopk.wire.indices import EntryRange as EntryRange
from oktopk.wire.values import Cast, Int8Blocks, Quantized, ValueCodec, Verbatim
from oktopk.wire.words import WORD_BITS
from oktopk.wire.words import words_per_value as words_per_value


@dataclass(frozen=True, slots=True)
class Codec:
    """A value codec and an index codec. In a message the values come first."""

    values: ValueCodec
    indices: IndexCodec

    def num_words(self, entries: EntryRange, dtype: torch.dtype) -> int:
        """The size in words of entries with values of `dtype`."""
        return self.values.num_words(entries.count, dtype) + self.indices.num_words(entries)


CodecName = Literal["plain", "fp32", "bf16", "fp16", "int8", "int4", "int2", "sign"]
"""The name of a codec, as in `Settings.wire`."""

CODECS: dict[CodecName, Codec] = {
    "plain": Codec(Verbatim(), Int32()),
    "fp32": Codec(Cast(torch.float32), EliasFano()),
    "bf16": Codec(Cast(torch.bfloat16), EliasFano()),
    "fp16": Codec(Cast(torch.float16), EliasFano()),
    "int8": Codec(Int8Blocks(), EliasFano()),
    "int4": Codec(Quantized(4), Rice()),
    "int2": Codec(Quantized(2), Rice()),
    "sign": Codec(Quantized(1), Rice()),
}

PLAIN = CODECS["plain"]


class Encoded(NamedTuple):
    """Entries as they are sent, and what the sender must know of them."""

    words: Tensor
    values: Tensor
    """As the receiver will read them; the tensor that was given if the value codec is exact."""

    entries: EntryRange
    """With the size of the indices, where senders tell it."""


def num_words(entries: EntryRange, codec_name: CodecName, dtype: torch.dtype) -> int:
    """The size in words of entries with values of `dtype`, as sender and receiver compute it."""
    return _layout(entries, codec_name, dtype).num_words(entries, dtype)


def max_words(entries: EntryRange, codec_name: CodecName, dtype: torch.dtype) -> int:
    """The largest size in words that entries can have, as far as it is known before they are
    encoded. The same on every rank."""
    codec = CODECS[codec_name]
    packed = codec.values.num_words(entries.count, dtype) + codec.indices.max_words(entries)
    return min(packed, PLAIN.num_words(entries, dtype))


def most_words(entries: EntryRange, codec_name: CodecName, dtype: torch.dtype) -> int:
    """A size in words that `entries.count` entries do not exceed, and no smaller number of them.

    With fewer entries Elias-Fano codes take no more bits, but their two parts are rounded up to
    words separately, which may take one more.
    """
    most = max_words(entries, codec_name, dtype) + 1
    return min(most, PLAIN.num_words(entries, dtype))


def entry_bits(codec_name: CodecName, density: float) -> float:
    """Bits on the wire of one float32 entry, when many are spread evenly at this density.

    For estimates: entries in clusters take fewer bits with codecs that adapt to them. At density 1
    everything travels plain.
    """
    if density >= 1:
        codec_name = "plain"
    codec, count = CODECS[codec_name], 2**20
    value_bits = WORD_BITS * codec.values.num_words(count, torch.float32) / count
    return min(value_bits + codec.indices.expected_bits(density), 2.0 * WORD_BITS)


def is_sized_by_count(codec_name: CodecName) -> bool:
    """Whether receivers can compute the size of a message from the number of its entries."""
    return CODECS[codec_name].indices.is_sized_by_count


def size_rounds(codec_name: CodecName) -> int:
    """Rounds of headers that messages need whose counts are known before they are encoded."""
    return 0 if is_sized_by_count(codec_name) else 1


def sizes_to_tell(entries: EntryRange, codec_name: CodecName) -> list[int]:
    """What the sender of some encoded entries tells the receiver ahead of the message.

    The number of entries; then the size of their indices, unless it follows from that number.
    """
    if is_sized_by_count(codec_name):
        return [entries.count]
    assert entries.num_index_words is not None, entries
    return [entries.count, entries.num_index_words]


def told_ranges(
    sizes: list[int], codec_name: CodecName, bounds: list[tuple[int, int]]
) -> list[EntryRange]:
    """The entries of several messages, from what `sizes_to_tell` gave for each and from the index
    range that each lies in."""
    num = 1 if is_sized_by_count(codec_name) else 2
    rows = [sizes[start : start + num] for start in range(0, len(sizes), num)]
    return [
        EntryRange(row[0], lo, hi, *row[1:]) for row, (lo, hi) in zip(rows, bounds, strict=True)
    ]


def is_possible(entries: EntryRange, codec_name: CodecName, dtype: torch.dtype) -> bool:
    """Whether the sizes that another rank told can be those of a message: no more entries than the
    range has, and no more words than they take."""
    if not 0 <= entries.count <= entries.hi - entries.lo:
        return False
    return num_words(entries, codec_name, dtype) <= max_words(entries, codec_name, dtype)


def is_exact(codec_name: CodecName) -> bool:
    """Whether receivers read exactly the values that were sent."""
    return CODECS[codec_name].values.is_exact


def encode(indices: Tensor, values: Tensor, entries: EntryRange, codec_name: CodecName) -> Encoded:
    """Write entries as words. O(count)."""
    codec, plain_words = CODECS[codec_name], PLAIN.num_words(entries, values.dtype)
    if not entries.count:
        return Encoded(indices.new_empty(0), values, _told(entries, codec, 0))
    words, decoded = codec.values.encode(values), values
    if not codec.values.is_exact:
        decoded = torch.empty_like(values)
        codec.values.decode(words, decoded)
    index_words = codec.indices.encode(indices, entries)
    if words.numel() + index_words.numel() < plain_words:
        told = _told(entries, codec, index_words.numel())
        return Encoded(torch.cat([words, index_words]), decoded, told)
    # rounded all the same, but not packed
    words, index_words = PLAIN.values.encode(decoded), PLAIN.indices.encode(indices, entries)
    return Encoded(torch.cat([words, index_words]), decoded, _told(entries, codec, 0))


def decode(
    words: Tensor, entries: EntryRange, codec_name: CodecName, indices: Tensor, values: Tensor
) -> Tensor:
    """Fill `indices` and `values` with the entries that `encode` wrote to `words`. O(count).

    Returns whether the indices ascend within their range, as a bool tensor of no dimension. The
    caller must not use the entries otherwise. Only where the host would have to wait for a device
    to know it, may it go on: such entries are then made harmless, NaN at indices in the range, so
    that the step is skipped as with any NaN.
    """
    layout = _layout(entries, codec_name, values.dtype)
    num_value_words = layout.values.num_words(entries.count, values.dtype)
    layout.indices.decode(words[num_value_words:], entries, indices)
    layout.values.decode(words[:num_value_words], values)
    is_sound = kernels.ascend_within(indices, entries.lo, entries.hi)
    if not kernels.is_synchronous(indices):
        indices.clamp_(entries.lo, entries.hi - 1)
        values.masked_fill_(~is_sound, torch.nan)
    return is_sound


def allocate_entries(
    ranges: list[EntryRange], like: Tensor
) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
    """Uninitialised indices and values of several ranges of entries, one range after the other.

    Returns the indices of all, views of the indices of each range, and the same for the values,
    which have the dtype of `like`.
    """
    counts = [entries.count for entries in ranges]
    indices = torch.empty(sum(counts), dtype=torch.int32, device=like.device)
    values = like.new_empty(sum(counts))
    return indices, list(indices.split(counts)), values, list(values.split(counts))


def _told(entries: EntryRange, codec: Codec, num_index_words: int) -> EntryRange:
    """The entries with the size of their indices, if senders tell it."""
    if codec.indices.is_sized_by_count:
        return entries
    return replace(entries, num_index_words=num_index_words)


def _layout(entries: EntryRange, codec_name: CodecName, dtype: torch.dtype) -> Codec:
    """The codec that lays out the words: the plain one unless the other one needs fewer words.

    A few entries in a wide range are smaller unpacked. The receiver decides from the same sizes.
    """
    codec = CODECS[codec_name]
    if not codec.indices.is_sized_by_count:
        return codec if entries.num_index_words else PLAIN
    packs = codec.num_words(entries, dtype) < PLAIN.num_words(entries, dtype)
    return codec if packs else PLAIN
