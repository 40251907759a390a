"""Codecs: a table of the ways in which selected entries are written as words of 32 bits.

A codec is a value codec and an index codec, chosen independently. To add one, write its value codec
in `values.py` or its index codec in `indices.py`; then add a name to `CodecName` and a row to
`CODECS`. Settings, configuration files and options take their choices from `CodecName`.

Sender and receiver both know how many entries a message has and in which index range they lie
(`EntryRange`). The size of the entries follows from that alone, whatever they are. So no size has
to be sent beside the counts, which are sent anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from oktopk.wire.indices import EliasFano, IndexCodec, Int32
from oktopk.wire.indices import EntryRange as EntryRange
from oktopk.wire.values import Cast, Int8Blocks, ValueCodec, Verbatim
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


CodecName = Literal["plain", "fp32", "bf16", "fp16", "int8"]
"""The name of a codec, as in `Settings.wire`."""

CODECS: dict[CodecName, Codec] = {
    "plain": Codec(Verbatim(), Int32()),
    "fp32": Codec(Cast(torch.float32), EliasFano()),
    "bf16": Codec(Cast(torch.bfloat16), EliasFano()),
    "fp16": Codec(Cast(torch.float16), EliasFano()),
    "int8": Codec(Int8Blocks(), EliasFano()),
}

PLAIN = CODECS["plain"]


def num_words(entries: EntryRange, codec_name: CodecName, dtype: torch.dtype) -> int:
    """The size in words of entries with values of `dtype`, as sender and receiver compute it."""
    return _layout(entries, codec_name, dtype).num_words(entries, dtype)


def entry_bits(codec_name: CodecName, density: float) -> float:
    """Bits on the wire of one float32 entry, when there are many at this density. For estimates.

    At density 1 everything travels plain.
    """
    if density >= 1:
        codec_name = "plain"
    count = 2**20
    entries = EntryRange(count, 0, round(count / density))
    return WORD_BITS * num_words(entries, codec_name, torch.float32) / count


def is_exact(codec_name: CodecName) -> bool:
    """Whether receivers read exactly the values that were sent."""
    return CODECS[codec_name].values.is_exact


def encode(
    indices: Tensor, values: Tensor, entries: EntryRange, codec_name: CodecName, out: Tensor
) -> Tensor:
    """Write entries to `out`, which has `num_words` words. O(count).

    Returns the values as the receiver will read them: the same tensor if the value codec is exact.
    """
    if not entries.count:
        return values
    codec, layout = CODECS[codec_name], _layout(entries, codec_name, values.dtype)
    words, decoded = codec.values.encode(values), values
    if not codec.values.is_exact:
        decoded = codec.values.decode(words, entries.count, values.dtype).to(values.dtype)
    if layout is not codec:
        words = layout.values.encode(decoded)  # rounded all the same, but not packed
    out[: words.numel()] = words
    layout.indices.encode(indices, entries, out[words.numel() :])
    return decoded


def decode(
    words: Tensor, entries: EntryRange, codec_name: CodecName, indices: Tensor, values: Tensor
) -> None:
    """Fill `indices` and `values` with the entries that `encode` wrote to `words`. O(count)."""
    layout = _layout(entries, codec_name, values.dtype)
    num_value_words = layout.values.num_words(entries.count, values.dtype)
    layout.indices.decode(words[num_value_words:], entries, indices)
    values.copy_(layout.values.decode(words[:num_value_words], entries.count, values.dtype))


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


def _layout(entries: EntryRange, codec_name: CodecName, dtype: torch.dtype) -> Codec:
    """The codec that lays out the words: the plain one unless the other one needs fewer words.

    A few entries in a wide range are smaller unpacked. The receiver decides from the same sizes.
    """
    codec = CODECS[codec_name]
    packs = codec.num_words(entries, dtype) < PLAIN.num_words(entries, dtype)
    return codec if packs else PLAIN
