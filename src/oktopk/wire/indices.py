# SPDX-License-Identifier: Apache-2.0
"""Index codecs: how the indices of selected entries are written as words of 32 bits.

Indices are integers all the way. They never pass through a floating-point number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from oktopk import kernels
from oktopk.wire.words import WORD_BITS, words_for_bits


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
