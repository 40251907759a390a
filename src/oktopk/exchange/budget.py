# SPDX-License-Identifier: Apache-2.0
"""Which density and which codec fit a network: the choice behind `density="auto"`.

Predictions are those of the cost model. What a run has measured of its own exchanges corrects the
link in it, so a wrong probe, or a network that changes, costs a revision or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

import torch

from oktopk import wire as codec
from oktopk.comm.communicator import Comm
from oktopk.methods import METHODS, agree_on_slowest, probe_kernels, probe_link
from oktopk.methods.base import Cost, KernelSpeed, Link, Work
from oktopk.settings import num_kept
from oktopk.wire import CodecName, EntryRange

DENSITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""What is chosen from. Neighbours differ enough for a choice to outlast the noise of a network."""

WIRES: tuple[CodecName, ...] = ("plain", "bf16", "int4")
"""Codecs that are chosen from: the fastest to write, the default, and one for slow links. Fewer
bits cost accuracy at the same density (docs/performance.md)."""

HEADROOM = 0.8
"""A higher density must fit into this much of the limit: else it would be taken back at once."""

NEARLY_AS_FAST = 1.2
"""A density whose exchange takes at most this many times as long as the fastest one may exceed the
limit. Latency, or kernels that read every element, can take nearly all of the time."""

LEAST, MOST = 0.01, 100.0
"""Bounds of the factor by which a measurement corrects the link."""

NO_KERNELS = KernelSpeed(0.0, 0.0)


class Choice(NamedTuple):
    """A density and a codec."""

    density: float
    wire: CodecName


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What is exchanged, how, and by how many ranks."""

    numel: int
    size: int
    method: str
    dtype: torch.dtype = torch.float32
    """Of sums."""

    shared_by: int = 1
    """Ranks that share the density (`Settings.shared_by`)."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Network and kernels as probed, the slowest rank's."""

    link: Link
    kernels: KernelSpeed
    codecs: dict[str, float]
    """Seconds to write and read an entry, by codec."""

    def cost(self, choice: Choice, what: Exchanged) -> Cost:
        """Rounds, bytes and kernel work of one exchange."""
        kept = num_kept(what.numel, choice.density / what.shared_by)
        work = Work(what.numel, kept, what.size, choice.wire, what.dtype)
        return METHODS[what.method].cost(work)

    def kernel_seconds(self, choice: Choice, what: Exchanged) -> float:
        """Seconds of one exchange without the network."""
        per_entry = self.kernels.per_entry + self.codecs[choice.wire]
        return self.cost(choice, what).kernel_seconds(replace(self.kernels, per_entry=per_entry))

    def predict(self, choice: Choice, what: Exchanged) -> float:
        """Seconds of one exchange."""
        network = self.cost(choice, what).seconds(self.link, NO_KERNELS)
        return network + self.kernel_seconds(choice, what)


def probe_speeds(comm: Comm, device: torch.device, wires: Sequence[CodecName]) -> Speeds:
    """Measure network, kernels and codecs with all ranks at once; all get the same figures."""
    link, kernels = probe_link(comm, device), probe_kernels(comm, device)
    taken = agree_on_slowest([_codec_seconds(wire, device) for wire in wires], comm, device)
    return Speeds(link, kernels, dict(zip(wires, taken, strict=True)))


def _codec_seconds(wire: CodecName, device: torch.device, count: int = 2**16) -> float:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, generator=generator).to(device)
    indices = torch.arange(0, 50 * count, 50, dtype=torch.int32, device=device)
    read_indices, read_values = torch.empty_like(indices), torch.empty_like(values)
    seconds = []
    for _ in range(3):
        start = perf_counter()
        words, _, entries = codec.encode(indices, values, EntryRange(count, 0, 50 * count), wire)
        codec.decode(words, entries, wire, read_indices, read_values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - start)
    return min(seconds) / count


def corrected(speeds: Speeds, now: Choice, what: Exchanged, seconds: float) -> Speeds:
    """The speeds with a link as slow as an exchange was that took so many seconds.

    The kernels are trusted: they were probed on this machine, and the network is what changes.
    """
    cost, kernels = speeds.cost(now, what), speeds.kernel_seconds(now, what)
    network = cost.seconds(speeds.link, NO_KERNELS)
    factor = min(max((seconds - kernels) / max(network, 1e-9), LEAST), MOST)
    return replace(speeds, link=Link(speeds.link.latency * factor, speeds.link.bandwidth / factor))


def choose(
    speeds: Speeds,
    what: Exchanged,
    wires: Sequence[CodecName],
    *,
    limit: float,
    now: Choice,
) -> Choice:
    """The highest density whose exchange takes at most `limit` seconds, and its fastest codec.

    A density above the present one must leave some headroom. A density that is nearly as fast as
    the fastest one may take longer: a lower one would save next to nothing.
    """

    def seconds(choice: Choice) -> float:
        return speeds.predict(choice, what)

    fastest = [min((Choice(density, wire) for wire in wires), key=seconds) for density in DENSITIES]
    least = NEARLY_AS_FAST * min(map(seconds, fastest))
    for choice in reversed(fastest):
        room = max(limit * (HEADROOM if choice.density > now.density else 1.0), least)
        if seconds(choice) <= room:
            return choice
    return fastest[0]
