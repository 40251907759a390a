# SPDX-License-Identifier: Apache-2.0
"""Value codecs: how the values of selected entries are written as words of 32 bits.

A codec may round. The sender keeps what rounding takes off in its residual, so it has to know the
values as the receiver will read them: it decodes its own words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.wire.words import WORD_BYTES, as_words, words_for_bits, words_per_value

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
