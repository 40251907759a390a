# SPDX-License-Identifier: Apache-2.0
"""The ledger: bytes and messages that a rank sent and received, by stage; headers are apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import add, attrgetter, sub


@dataclass(slots=True)
class Traffic:
    """Bytes and messages of one rank. Payload is gradient entries; headers are sizes and counts."""

    payload_sent: int = 0
    """Bytes of gradient entries that were sent."""

    header_sent: int = 0
    """Bytes of sizes, counts, bounds and checksums that were sent."""

    messages_sent: int = 0
    """Messages that were sent; empty ones never are."""

    payload_received: int = 0
    """Bytes of gradient entries that were received."""

    header_received: int = 0
    """Bytes of sizes, counts, bounds and checksums that were received."""

    messages_received: int = 0
    """Messages that were received."""

    @property
    def sent(self) -> int:
        """All bytes that were sent."""
        return self.payload_sent + self.header_sent

    @property
    def received(self) -> int:
        """All bytes that were received."""
        return self.payload_received + self.header_received

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, _counts(self), _counts(other)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*map(sub, _counts(self), _counts(other)))


_counts = attrgetter(*(each.name for each in fields(Traffic)))  # looked up once: it is added often


def messages(sent: Iterable[int], received: Iterable[int], *, header: bool) -> Traffic:
    """Count messages of the given sizes. Empty ones are never sent, so they do not count."""
    sent, received = [b for b in sent if b], [b for b in received if b]
    kind = "header" if header else "payload"
    return Traffic(
        **{f"{kind}_sent": sum(sent), f"{kind}_received": sum(received)},
        messages_sent=len(sent),
        messages_received=len(received),
    )


def dense_allreduce(nbytes: int, size: int) -> Traffic:
    """Count a dense allreduce as reduce-scatter and allgather: each rank sends 2n(P-1)/P elements.

    The process group chooses the algorithm. Every bandwidth-optimal one sends this much.
    """
    share, num = 2 * nbytes * (size - 1) // size, 2 * (size - 1) if nbytes else 0
    return Traffic(
        payload_sent=share, payload_received=share, messages_sent=num, messages_received=num
    )


@dataclass(slots=True)
class Ledger:
    """Traffic by stage (`split`, `gather`, ...), counted from the start."""

    stages: dict[str, Traffic] = field(default_factory=dict)
    sizes: dict[str, Counter[int]] = field(default_factory=dict)
    """Messages sent, by stage and by the bit length of their size: 11 is from 1 to 2 KiB."""

    def add(self, stage: str, traffic: Traffic, sent: Iterable[int]) -> None:
        """Add the traffic of some messages; `sent` has the bytes of each that was sent."""
        self.stages[stage] = self.stages.get(stage, Traffic()) + traffic
        sizes = self.sizes.setdefault(stage, Counter())
        sizes.update(size.bit_length() for size in sent if size)

    def total(self) -> Traffic:
        # a copy: another thread may add a stage meanwhile
        return sum(list(self.stages.values()), Traffic())

    def snapshot(self) -> dict[str, Traffic]:
        """Return the counts until now, for `since`."""
        return dict(self.stages)

    def since(self, before: dict[str, Traffic]) -> dict[str, Traffic]:
        """Return what was added after the snapshot `before`, by stage."""
        return {
            stage: traffic - before.get(stage, Traffic()) for stage, traffic in self.stages.items()
        }
