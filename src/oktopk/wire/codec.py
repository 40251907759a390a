"""How entries become words of 32 bits, and come back.

A run is a number of entries, ascending, in an index range that both sides know. So both know its
size in words, whatever the entries are: no size has to travel, and nothing can be misread.

Indices are packed as Elias and Fano did: the low bits of each as they are, the high bits as gaps in
a string with a one for each entry. That takes 2 + log2(range / entries) bits at most, 7.6 at 2 %,
is exact at any density and needs no escapes. Values are fp32, or fewer bits; what rounding takes
off never leaves the sender's residual. Where packing would not make a run smaller it is plain: the
value bits and the index, a word each for fp32.

Indices never pass through a float.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from oktopk import kernels

WORD = 4  # bytes
BITS = 8 * WORD
BLOCK = 256  # 8-bit values that share a scale

Form = Literal["plain", "fp32", "bf16", "fp16", "int8"]
VALUES: dict[Form, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class Run:
    """`count` entries with lo <= index < hi."""

    count: int
    lo: int
    hi: int

    @property
    def low_bits(self) -> int:
        """Bits of an index that are sent as they are."""
        return max(((self.hi - self.lo) // self.count).bit_length() - 1, 0) if self.count else 0

    @property
    def low_words(self) -> int:
        return -(-self.count * self.low_bits // BITS)

    @property
    def high_words(self) -> int:
        bits = self.count + ((self.hi - self.lo - 1) >> self.low_bits) + 1
        return -(-bits // BITS)


def words_per_value(dtype: torch.dtype) -> int:
    """Words of a value as it is."""
    return dtype.itemsize // WORD


def plain_words(run: Run, dtype: torch.dtype) -> int:
    """Words of a run that is not packed."""
    return run.count * (1 + words_per_value(dtype))


def value_words(count: int, form: Form) -> int:
    """Words of so many packed values."""
    words = -(-count * VALUES[form].itemsize // WORD)
    return words + (-(-count // BLOCK) if form == "int8" else 0)


def num_words(run: Run, form: Form, dtype: torch.dtype) -> int:
    """The size of a run of values of `dtype`; what both sides know without a message."""
    plain = plain_words(run, dtype)
    if form == "plain" or not run.count:
        return plain
    return min(plain, value_words(run.count, form) + run.low_words + run.high_words)


def encode(indices: Tensor, values: Tensor, run: Run, form: Form, out: Tensor) -> Tensor:
    """Write a run into `out`, which has `num_words`; the values as the other side will read them.

    O(num). The values come back as they are, the same tensor, when the form loses nothing.
    """
    if not run.count:
        return values
    coded = _coded(values, form)
    if out.numel() == plain_words(run, values.dtype):
        arrive = values if coded is None else _decoded(coded, run.count, form, values.dtype)
        out[: -run.count] = arrive.contiguous().view(torch.int32)
        out[-run.count :] = indices
        return arrive
    assert coded is not None
    low, high = out[coded.numel() :].split([run.low_words, run.high_words])
    out[: coded.numel()] = coded
    kernels.encode_indices(indices, run.lo, run.low_bits, low, high)
    return _decoded(coded, run.count, form, values.dtype)


def decode(words: Tensor, run: Run, form: Form, indices: Tensor, values: Tensor) -> None:
    """Fill `indices` and `values` with those of a run. O(num)."""
    if words.numel() == plain_words(run, values.dtype):
        bits, where = words.split([words.numel() - run.count, run.count])
        indices.copy_(where)
        values.copy_(bits.clone().view(values.dtype))  # a copy is aligned for any type
        return
    coded, low, high = words.split([value_words(run.count, form), run.low_words, run.high_words])
    kernels.decode_indices(low, high, run.lo, run.low_bits, indices)
    if form == "int8":
        values.copy_(_decoded(coded, run.count, form, values.dtype))
    else:
        values.copy_(coded.view(VALUES[form])[: run.count])


def room(runs: list[Run], like: Tensor) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
    """Indices and values of runs, one after the other, and the parts of each run."""
    counts = [run.count for run in runs]
    indices = torch.empty(sum(counts), dtype=torch.int32, device=like.device)
    values = like.new_empty(sum(counts))
    return indices, list(indices.split(counts)), values, list(values.split(counts))


def _coded(values: Tensor, form: Form) -> Tensor | None:
    """Values as words; None for the plain form."""
    if form == "plain":
        return None
    if form == "int8":
        return _in_blocks(values.float())
    narrow = values.to(VALUES[form])
    return _as_words(narrow)


def _decoded(coded: Tensor, count: int, form: Form, dtype: torch.dtype) -> Tensor:
    if form == "int8":
        num_blocks = -(-count // BLOCK)
        scales = coded[:num_blocks].view(torch.float32)
        steps = coded[num_blocks:].clone().view(torch.int8)[:count]
        return (steps * scales.unsqueeze(1).expand(-1, BLOCK).reshape(-1)[:count]).to(dtype)
    return coded.view(VALUES[form])[:count].to(dtype)


def _in_blocks(values: Tensor) -> Tensor:
    """A scale per block, then a byte per value: the nearest of 255 multiples of the scale."""
    num_blocks = -(-values.numel() // BLOCK)
    padded = values.new_zeros(num_blocks, BLOCK)
    padded.view(-1)[: values.numel()] = values
    scales = padded.abs().amax(1, keepdim=True) / 127
    # a block of zeros has no scale, and a denormal one no multiples
    steps = torch.where(scales > 0, padded / scales, 0).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat(
        [scales.view(-1).view(torch.int32), _as_words(steps.view(-1)[: values.numel()])]
    )


def _as_words(narrow: Tensor) -> Tensor:
    per_word = WORD // narrow.dtype.itemsize
    if short := -narrow.numel() % per_word:
        narrow = torch.cat([narrow, narrow.new_zeros(short)])
    return narrow.contiguous().view(torch.int32)
