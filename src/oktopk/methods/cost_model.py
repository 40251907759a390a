# SPDX-License-Identifier: Apache-2.0
"""The cost model: what one exchange of a method takes on a given network and machine.

Time is rounds x latency + bytes / bandwidth + the seconds of the kernels. Bandwidth is what a rank
sends while all ranks send, so it includes whatever they share: a switch, a core, a memory bus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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

    bits: float = 23.6
    """Of an entry on the wire (`oktopk.wire.codec.entry_bits`)."""

    value_bytes: int = 4

    size_rounds: int = 0
    """Rounds of headers more before a gather of sums: 1 with a codec whose sizes do not follow from
    the counts (`oktopk.wire.codec.size_rounds`)."""

    short_bytes: int = SHORT_BYTES
    """Bytes that a rank may send in a short exchange (`Settings.short_bytes`)."""

    @property
    def entry_bytes(self) -> float:
        return self.bits / 8

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
