# SPDX-License-Identifier: Apache-2.0
"""The cost model: what one exchange of a method takes on a given network and machine.

Time is rounds x latency + bytes / bandwidth + the seconds of the kernels. Bandwidth is what a rank
sends while all ranks send, so it includes whatever they share: a switch, a core, a memory bus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from oktopk.wire.codec import CodecName, entry_bits
from oktopk.wire.codec import size_rounds as codec_size_rounds

SHORT_BYTES = 96 * 2**10
"""Bytes that a rank may send in the short exchange of `oktopk` (`Settings.short_bytes`)."""


@dataclass(frozen=True, slots=True)
class Link:
    """A network as its ranks see it."""

    latency: float
    """Seconds of a round of smallest messages between all ranks."""

    bandwidth: float
    """Bytes a rank sends per second while all ranks send."""


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """How fast the kernels are on this machine."""

    per_element: float
    """Seconds to accumulate, select and apply, per element of the gradient."""

    per_entry: float
    """Seconds to encode, decode and add, per entry."""


@dataclass(frozen=True, slots=True)
class Work:
    """A gradient to exchange."""

    numel: int
    kept: int
    size: int
    """World size."""

    wire: CodecName = "bf16"
    dtype: torch.dtype = torch.float32
    """Of sums. Those of float64 travel plain, whatever the codec."""

    num_dense: int = 0
    """Entries that travel dense, beside the `numel`."""

    short_bytes: int = SHORT_BYTES
    """Bytes that a rank may send in a short exchange (`Settings.short_bytes`)."""

    @property
    def codec(self) -> CodecName:
        """How entries travel."""
        return "plain" if self.dtype == torch.float64 else self.wire

    @property
    def size_rounds(self) -> int:
        """Rounds of headers more before a gather of sums: 1 with a codec whose sizes do not follow
        from the counts."""
        return codec_size_rounds(self.codec)

    def sparse_bytes(self, num: float) -> float:
        """Bytes on the wire of so many entries, spread evenly over the gradient."""
        wide = self.dtype == torch.float64
        return num * (96.0 if wide else entry_bits(self.codec, num / max(self.numel, 1))) / 8

    @property
    def dense_bytes(self) -> int:
        """Bytes of what travels dense, sent once."""
        return self.num_dense * self.dtype.itemsize

    @property
    def union(self) -> float:
        """Expected number of entries that some rank selected, if ranks select independently."""
        if self.kept >= self.numel:
            return self.numel
        return self.numel * -math.expm1(self.size * math.log1p(-self.kept / self.numel))


@dataclass(frozen=True, slots=True)
class Cost:
    """What one exchange costs the rank that has the most to do."""

    rounds: float
    bytes: float
    """Bytes that are sent one after the other, by one rank or along the longest way."""

    sent: float
    """Bytes that a rank sends, the mean of all ranks. Headers are not in it."""

    elements: float
    """Elements of the gradient that the kernels walk over."""

    entries: float
    """Entries that the kernels encode, decode or add."""

    def kernel_seconds(self, speed: KernelSpeed) -> float:
        return self.elements * speed.per_element + self.entries * speed.per_entry

    def seconds(self, link: Link, speed: KernelSpeed) -> float:
        """Predicted seconds, selection and delivery included, with nothing overlapped."""
        network = self.rounds * link.latency + self.bytes / link.bandwidth
        return network + self.kernel_seconds(speed)
