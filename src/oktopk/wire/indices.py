"""Index codecs: how the indices of selected entries are written as words of 32 bits.

Indices are integers all the way. They never pass through a floating-point number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from oktopk import kernels
from oktopk.wire.words import words_for_bits


@dataclass(frozen=True, slots=True)
class EntryRange:
    """What both sides know of the entries in a message before it is sent.

    There are `count` entries with ascending indices, and `lo <= index < hi` for each of them.
    """

    count: int
    lo: int
    hi: int


class IndexCodec(Protocol):
    """One way to write ascending indices as words."""

    def num_words(self, entries: EntryRange) -> int:
        """The size in words. It may not depend on the indices, since the receiver computes it
        before it has them."""
        ...

    def encode(self, indices: Tensor, entries: EntryRange, out: Tensor) -> None:
        """Write int32 indices to `out`, which has `num_words` words."""
        ...

    def decode(self, words: Tensor, entries: EntryRange, out: Tensor) -> None:
        """Fill `out` with the int32 indices that `encode` wrote."""
        ...


@dataclass(frozen=True, slots=True)
class Int32:
    """One word for each index."""

    def num_words(self, entries: EntryRange) -> int:
        return entries.count

    def encode(self, indices: Tensor, entries: EntryRange, out: Tensor) -> None:
        out.copy_(indices)

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

    def num_words(self, entries: EntryRange) -> int:
        return self.num_low_words(entries) + self.num_high_words(entries)

    def encode(self, indices: Tensor, entries: EntryRange, out: Tensor) -> None:
        low, high = self._split(out, entries)
        kernels.encode_elias_fano(indices, entries.lo, self.num_low_bits(entries), low, high)

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
