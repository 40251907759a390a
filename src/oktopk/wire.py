# SPDX-License-Identifier: Apache-2.0
"""What is sent: codecs of values and of indices, messages, and their sizes in words of 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from oktopk import kernels

# The unit of every message: words of 32 bits, held in int32 tensors.


WORD_BYTES = 4
WORD_BITS = 8 * WORD_BYTES


def words_per_value(dtype: torch.dtype) -> int:
    """Words of one float32 or float64 value that is sent as it is."""
    return dtype.itemsize // WORD_BYTES


def words_for_bits(num_bits: int) -> int:
    """The fewest words that hold so many bits."""
    return -(-num_bits // WORD_BITS)


def as_words(values: Tensor) -> Tensor:
    """The bits of values of any dtype of at most 32 bits, padded with zeros to whole words.

    The result shares memory with `values` where nothing has to be padded or made contiguous.
    """
    per_word = WORD_BYTES // values.dtype.itemsize
    if missing := -values.numel() % per_word:
        values = torch.cat([values, values.new_zeros(missing)])
    return values.contiguous().view(torch.int32)


# Index codecs: how the indices of selected entries are written as words of 32 bits.
#
# Indices are integers all the way. They never pass through a floating-point number.


@dataclass(frozen=True, slots=True)
class EntryRange:
    """What both sides know of the entries in a message before it is sent.

    There are `count` entries with ascending indices, and `lo <= index < hi` for each of them.
    """

    count: int
    lo: int
    hi: int
    num_index_words: int | None = None
    """The size of the encoded indices, where it does not follow from the rest and the sender tells
    it. 0 if the entries are laid out as by the plain codec, because that is smaller."""


class IndexCodec(Protocol):
    """One way to write ascending indices as words."""

    is_sized_by_count: ClassVar[bool]
    """Whether the size follows from the number of the entries and their range. If not, senders tell
    the size ahead of the message, beside the number of the entries."""

    def num_words(self, entries: EntryRange) -> int:
        """The size in words."""
        ...

    def max_words(self, entries: EntryRange) -> int:
        """The largest size in words, whatever the indices are. `num_index_words` may be None."""
        ...

    def expected_bits(self, density: float) -> float:
        """Bits of one of many indices that are spread evenly at this density. For estimates."""
        ...

    def encode(self, indices: Tensor, entries: EntryRange) -> Tensor:
        """The int32 indices as `num_words` words, an int32 tensor."""
        ...

    def decode(self, words: Tensor, entries: EntryRange, out: Tensor) -> None:
        """Fill `out` with the int32 indices that `encode` wrote.

        The words may hold anything. If they hold no such indices, some of `out` do not ascend or
        lie outside of the range.
        """
        ...


@dataclass(frozen=True, slots=True)
class Int32:
    """One word for each index."""

    is_sized_by_count: ClassVar[bool] = True

    def num_words(self, entries: EntryRange) -> int:
        return entries.count

    def max_words(self, entries: EntryRange) -> int:
        return entries.count

    def expected_bits(self, density: float) -> float:
        return WORD_BITS

    def encode(self, indices: Tensor, entries: EntryRange) -> Tensor:
        return indices

    def decode(self, words: Tensor, entries: EntryRange, out: Tensor) -> None:
        out.copy_(words)


@dataclass(frozen=True, slots=True)
class EliasFano:
    """Elias-Fano coding: at most 2 + log2(range / count) bits for each index, exact at any density.

    An index is taken relative to `lo` and cut in two. Its low bits are sent as they are. Its high
    bits are sent in unary: entry number i with the high part h sets bit `h + i` of a bit string.
    High parts ascend, so no two entries set the same bit, and the receiver finds h again as the
    position of the i-th one minus i. The string has a one for each entry and a zero for each step
    of the high part, which is why its length follows from the count and the range alone.
    """

    is_sized_by_count: ClassVar[bool] = True

    def num_words(self, entries: EntryRange) -> int:
        return self.num_low_words(entries) + self.num_high_words(entries)

    def max_words(self, entries: EntryRange) -> int:
        return self.num_words(entries)

    def expected_bits(self, density: float) -> float:
        count = 2**20
        return WORD_BITS * self.num_words(EntryRange(count, 0, round(count / density))) / count

    def encode(self, indices: Tensor, entries: EntryRange) -> Tensor:
        words = indices.new_empty(self.num_words(entries))
        low, high = self._split(words, entries)
        kernels.encode_elias_fano(indices, entries.lo, self.num_low_bits(entries), low, high)
        return words

    def decode(self, words: Tensor, entries: EntryRange, out: Tensor) -> None:
        low, high = self._split(words, entries)
        kernels.decode_elias_fano(low, high, entries.lo, self.num_low_bits(entries), out)

    def num_low_bits(self, entries: EntryRange) -> int:
        """Bits of every index that are sent as they are: log2 of the mean gap, rounded down."""
        if not entries.count:
            return 0
        mean_gap = (entries.hi - entries.lo) // entries.count
        return max(mean_gap.bit_length() - 1, 0)

    def num_low_words(self, entries: EntryRange) -> int:
        """Words of the low bits of all entries."""
        return words_for_bits(entries.count * self.num_low_bits(entries))

    def num_high_words(self, entries: EntryRange) -> int:
        """Words of the bit string of the high parts."""
        largest_high = (entries.hi - entries.lo - 1) >> self.num_low_bits(entries)
        return words_for_bits(entries.count + largest_high + 1)

    def _split(self, words: Tensor, entries: EntryRange) -> tuple[Tensor, ...]:
        return words.split([self.num_low_words(entries), self.num_high_words(entries)])


@dataclass(frozen=True, slots=True)
class Rice:
    """Rice coding of the gaps between indices, with a parameter for every 64 of them.

    Where indices lie evenly it takes half a bit less than Elias-Fano coding. Those of gradients lie
    in clusters, where a block of small gaps takes fewer bits than the mean gap would ask for. So
    the size depends on the indices, and the sender has to tell it.
    """

    is_sized_by_count: ClassVar[bool] = False

    def num_words(self, entries: EntryRange) -> int:
        assert entries.num_index_words is not None, entries
        return entries.num_index_words

    def max_words(self, entries: EntryRange) -> int:
        # With the parameter of Elias-Fano coding, every block would take as many bits as there.
        # The parameters come on top, and a word for the part that is rounded up on its own.
        return EliasFano().num_words(entries) + self._num_parameter_words(entries) + 1

    def expected_bits(self, density: float) -> float:
        # Only operations that round alike on every machine: ranks decide by the result.
        longer = 1 - density  # the probability that a gap goes on for `1 << parameter` more
        fewest = float(WORD_BITS)
        for parameter in range(WORD_BITS):
            fewest = min(fewest, parameter + 1 + longer / max(1 - longer, 1e-300))
            longer *= longer
        return fewest + 8 / kernels.RICE_BLOCK

    def encode(self, indices: Tensor, entries: EntryRange) -> Tensor:
        return kernels.encode_rice(indices, entries.lo)

    def decode(self, words: Tensor, entries: EntryRange, out: Tensor) -> None:
        kernels.decode_rice(words, entries.lo, out)

    def _num_parameter_words(self, entries: EntryRange) -> int:
        return words_for_bits(8 * kernels.num_blocks(entries.count, kernels.RICE_BLOCK))


# Value codecs: how the values of selected entries are written as words of 32 bits.
#
# A codec may round. The sender keeps what rounding takes off in its residual, so it has to know
# the values as the receiver will read them: it decodes its own words.


BLOCK = 256  # 8-bit values that share one scale


class ValueCodec(Protocol):
    """One way to write values as words."""

    is_exact: ClassVar[bool]
    """Whether values of every dtype arrive bit for bit. Then the sender need not decode its words
    to know what the receiver reads."""

    def num_words(self, count: int, dtype: torch.dtype) -> int:
        """The size of `count` values of `dtype` in words. It may not depend on the values, since
        the receiver computes it before it has them."""
        ...

    def encode(self, values: Tensor) -> Tensor:
        """The values as `num_words` words, an int32 tensor."""
        ...

    def decode(self, words: Tensor, out: Tensor) -> None:
        """Fill `out`, which is contiguous, with the values that `encode` wrote."""
        ...


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Every value in its own dtype, bit for bit: one word for float32, two for float64."""

    is_exact: ClassVar[bool] = True

    def num_words(self, count: int, dtype: torch.dtype) -> int:
        return count * words_per_value(dtype)

    def encode(self, values: Tensor) -> Tensor:
        return values.contiguous().view(torch.int32)

    def decode(self, words: Tensor, out: Tensor) -> None:
        # as words: float64 may not start at an odd word of a message
        out.view(torch.int32).copy_(words)


@dataclass(frozen=True, slots=True)
class Cast:
    """Every value rounded to another floating-point dtype."""

    is_exact: ClassVar[bool] = False
    to: torch.dtype

    def num_words(self, count: int, dtype: torch.dtype) -> int:
        return -(-count * self.to.itemsize // WORD_BYTES)

    def encode(self, values: Tensor) -> Tensor:
        return as_words(values.to(self.to))

    def decode(self, words: Tensor, out: Tensor) -> None:
        out.copy_(words.view(self.to)[: out.numel()])


@dataclass(frozen=True, slots=True)
class Int8Blocks:
    """A float32 scale for every 256 values, then a byte for each value.

    The scale is the largest magnitude of its block divided by 127. A value becomes the nearest
    integer multiple of the scale, from -127 to 127.
    """

    is_exact: ClassVar[bool] = False

    def num_words(self, count: int, dtype: torch.dtype) -> int:
        return _num_blocks(count) + -(-count // WORD_BYTES)

    def encode(self, values: Tensor) -> Tensor:
        count = values.numel()
        padded = values.new_zeros(_num_blocks(count), BLOCK, dtype=torch.float32)
        padded.view(-1)[:count] = values
        scales = padded.abs().amax(1, keepdim=True) / 127
        # A block of zeros has the scale 0. So has a block of denormals, whose quotient by 127 is 0.
        # The receiver reads zeros for both.
        multiples = torch.where(scales > 0, padded / scales, 0).round_().clamp_(-127, 127)
        steps = multiples.to(torch.int8).view(-1)[:count]
        return torch.cat([as_words(scales.view(-1)), as_words(steps)])

    def decode(self, words: Tensor, out: Tensor) -> None:
        count = out.numel()
        num_blocks = _num_blocks(count)
        scales = words[:num_blocks].view(torch.float32)
        steps = words[num_blocks:].clone().view(torch.int8)[:count]
        torch.mul(steps, scales.unsqueeze(1).expand(-1, BLOCK).reshape(-1)[:count], out=out)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A sign and one of a few levels for each value, in `num_bits` bits; levels by blocks of 128.

    The levels follow from one or two numbers in bfloat16 for each block, which come first.
    """

    is_exact: ClassVar[bool] = False
    num_bits: int

    def num_words(self, count: int, dtype: torch.dtype) -> int:
        return self._num_parameter_words(count) + words_for_bits(count * self.num_bits)

    def encode(self, values: Tensor) -> Tensor:
        count = values.numel()
        words = torch.empty(
            self.num_words(count, values.dtype), dtype=torch.int32, device=values.device
        )
        kernels.quantize(values.float(), self.num_bits, *self._split(words, count))
        return words

    def decode(self, words: Tensor, out: Tensor) -> None:
        values = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        parameters, codes = self._split(words, out.numel())
        kernels.dequantize(parameters, codes, self.num_bits, values)
        if values is not out:
            out.copy_(values)

    def _num_parameter_words(self, count: int) -> int:
        num_blocks = kernels.num_blocks(count, kernels.QUANTIZE_BLOCK)
        return words_for_bits(16 * num_blocks * kernels.QUANTIZERS[self.num_bits].num_parameters)

    def _split(self, words: Tensor, count: int) -> tuple[Tensor, ...]:
        first = self._num_parameter_words(count)
        return words.split([first, words.numel() - first])


def _num_blocks(count: int) -> int:
    return kernels.num_blocks(count, BLOCK)


# Codecs: a table of the ways in which selected entries are written as words of 32 bits.
#
# A codec is a value codec and an index codec, chosen independently. To add one, write its value
# codec in `values.py` or its index codec in `indices.py`; then add a name to `CodecName` and a row
# to `CODECS`. Settings, configuration files and options take their choices from `CodecName`.
#
# Sender and receiver both know how many entries a message has and in which index range they lie
# (`EntryRange`). With most codecs the size of the entries follows from that alone, whatever they
# are. So no size has to be sent beside the counts, which are sent anyway. Where indices are coded
# by Rice, their size is sent with the counts (`sizes_to_tell`).
#
# A receiver trusts neither: sizes that no message has are refused before memory is allocated for
# them (`is_possible`), and decoding tells whether the indices ascend within their range
# (`decode`). What passes is a message that some rank could have sent. Bits that were flipped in a
# value, or that make another ascending list of indices, are for the checksums of the network to
# find.


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


# Messages: selected entries, and values that travel dense behind them.
#
# Biases, norms and tiny tensors are not worth indices, nor a message of their own. All of their
# values travel, in their own dtype and exactly, at the end of the messages of the sparse exchange.


class Message(NamedTuple):
    """The decoded content of one message, or of several."""

    indices: Tensor
    values: Tensor
    dense_part: Tensor
    """The values that travel dense behind the entries."""


Expect = Callable[[Tensor, int], None]
"""Called with whether a message is sound, as `decode` tells it, and the rank that sent it."""


def message_words(
    entries: EntryRange, codec_name: CodecName, dtype: torch.dtype, num_dense: int
) -> int:
    """The size of a message in words, as sender and receiver compute it."""
    return num_words(entries, codec_name, dtype) + num_dense * words_per_value(dtype)


def write_message(
    indices: Tensor, values: Tensor, entries: EntryRange, codec_name: CodecName, dense_part: Tensor
) -> Encoded:
    """Encode a message. O(count)."""
    encoded = encode(indices, values, entries, codec_name)
    words = torch.cat([encoded.words, dense_part.contiguous().view(torch.int32)])
    return encoded._replace(words=words)


def read_message(
    words: Tensor, entries: EntryRange, codec_name: CodecName, indices: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Decode a message: fill `indices` and `values`. O(count).

    Returns its dense part, and whether its entries are sound, as `decode` does.
    """
    num_entry_words = num_words(entries, codec_name, values.dtype)
    is_sound = decode(words[:num_entry_words], entries, codec_name, indices, values)
    # the copy is aligned for float64, which may start at an odd word here
    return words[num_entry_words:].clone().view(values.dtype), is_sound


def read_messages(
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
    indices, index_parts, values, value_parts = allocate_entries(ranges, own.values)
    dense_parts = []
    for peer, entries in enumerate(ranges):
        if peer not in received:
            index_parts[peer].copy_(own.indices)
            value_parts[peer].copy_(own.values)
            dense_parts.append(own.dense_part)
        else:
            parts = index_parts[peer], value_parts[peer]
            dense_part, is_sound = read_message(received[peer], entries, codec_name, *parts)
            expect(is_sound, peer)
            dense_parts.append(dense_part)
    return Message(indices, values, _sum_in_order(dense_parts))


def _sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
