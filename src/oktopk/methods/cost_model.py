"""What an exchange will take: a plain model of the network and of the kernels, and its two probes.

Time is rounds x latency + bytes / bandwidth + what the kernels take. Bandwidth is what a rank sends
while all ranks send, so it has in it whatever they share: a switch, a core, a memory bus.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from oktopk import kernels
from oktopk.comm.communicator import Comm

MEGABYTE = 2**20
VALUE_BITS = {"plain": 64.0, "fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "int8": 8.1}


def entry_bits(form: str, density: float) -> float:
    """Bits of an entry on the wire: its value, and 2 + log2(1/density) for its index, at most."""
    if form == "plain" or density >= 1:
        return VALUE_BITS["plain"]
    return min(VALUE_BITS[form] + 1.95 + math.log2(1 / density), VALUE_BITS["plain"])


@dataclass(frozen=True, slots=True)
class Link:
    """A network as its ranks see it."""

    latency: float
    """Seconds of a round of smallest messages between all ranks."""

    bandwidth: float
    """Bytes a rank sends per second while all do."""


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast the kernels are here."""

    per_element: float
    """Seconds to accumulate, select and settle one element of the gradient."""

    per_entry: float
    """Seconds to encode, decode and add one entry."""


@dataclass(frozen=True, slots=True)
class Work:
    """A gradient to exchange."""

    numel: int
    kept: int
    size: int
    """Ranks."""

    bits: float = 23.6
    """Of an entry on the wire (`entry_bits`)."""

    value_bytes: int = 4

    @property
    def entry(self) -> float:
        return self.bits / 8

    @property
    def union(self) -> float:
        """Entries that some rank chose, if they choose without regard to each other."""
        if self.kept >= self.numel:
            return self.numel
        return self.numel * -math.expm1(self.size * math.log1p(-self.kept / self.numel))


@dataclass(frozen=True, slots=True)
class Bill:
    """What a method costs a rank that has the most to do."""

    rounds: float
    bytes: float
    elements: float
    """Elements of the gradient the kernels walk over."""

    entries: float
    """Entries they encode, decode or add."""

    def kernels(self, machine: Machine) -> float:
        """Seconds of the kernels."""
        return self.elements * machine.per_element + self.entries * machine.per_entry


def _dense(w: Work) -> Bill:
    rounds = 2 * math.ceil(math.log2(w.size)) if w.size > 1 else 0
    return Bill(rounds, 2 * w.value_bytes * w.numel * (w.size - 1) / w.size, 0, 0)


def _allgather(w: Work) -> Bill:
    return Bill(2, w.kept * (w.size - 1) * w.entry, w.numel, w.kept * w.size)


def _regions(w: Work) -> Bill:
    share = (w.size - 1) / w.size
    sent = min(w.union * w.entry, w.numel * w.value_bytes)
    return Bill(4, share * (w.kept * w.entry + sent), w.numel, 2 * w.kept + w.union)


def _tree(w: Work) -> Bill:
    levels = math.ceil(math.log2(w.size)) if w.size > 1 else 0
    return Bill(4 * levels, 2 * levels * w.kept * w.entry, w.numel, 4 * levels * w.kept)


def _oktopk(w: Work) -> Bill:
    share = (w.size - 1) / w.size
    return Bill(4, 2 * share * w.kept * w.entry, w.numel, 4 * w.kept)


BILLS: dict[str, Callable[[Work], Bill]] = {
    "dense": _dense,
    "topka": _allgather,
    "gaussiank": _allgather,
    "topkdsa": _regions,
    "gtopk": _tree,
    "oktopk": _oktopk,
}

CHOICES = ("dense", "topka", "oktopk")
"""What `auto` chooses from."""


def seconds(method: str, work: Work, link: Link, machine: Machine) -> float:
    """Predicted seconds of one exchange, selection and delivery included, nothing overlapped."""
    bill = BILLS[method](work)
    return bill.rounds * link.latency + bill.bytes / link.bandwidth + bill.kernels(machine)


def break_even(method: str, work: Work, latency: float, machine: Machine) -> float:
    """Bytes per second below which a method is faster than dense; infinite if it always is."""
    dense, other = BILLS["dense"](work), BILLS[method](work)
    saved = dense.bytes - other.bytes
    spent = (other.rounds - dense.rounds) * latency + other.kernels(machine)
    if saved <= 0:
        return 0.0
    return saved / spent if spent > 0 else math.inf


def cheapest(work: Work, link: Link, machine: Machine) -> dict[str, float]:
    """The choices of `auto` and their seconds, the best first."""
    times = {method: seconds(method, work, link, machine) for method in CHOICES}
    return dict(sorted(times.items(), key=lambda item: item[1]))


def probe_link(comm: Comm, device: torch.device, rounds: int = 3) -> Link:
    """Measure, with all ranks at once; every rank has the same answer, the slowest rank's.

    Sends about 16 MB for each round, whatever the number of ranks.
    """
    peers = max(comm.size - 1, 1)
    small = torch.zeros(1, device=device)
    large = torch.zeros(max(4 * MEGABYTE // peers, 2**14), device=device)
    taken = []
    for x, repeats in ((small, 20), (large, rounds)):
        comm.all_gather(x, stage="probe")
        _finish_work(device)
        start = perf_counter()
        for _ in range(repeats):
            comm.all_gather(x, stage="probe")
        _finish_work(device)
        taken.append(max((perf_counter() - start) / repeats, 1e-9))
    slowest = _slowest(taken, comm, device)
    return Link(slowest[0], large.nbytes * peers / max(slowest[1] - slowest[0], 1e-9))


def probe_machine(comm: Comm, device: torch.device, numel: int = 2**21) -> Machine:
    """Measure the kernels, on all ranks at once since they may share cores; the slowest rank's."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(numel, generator=generator).to(device)
    kept = numel // 50
    threshold = kernels.kth_magnitude(grad, kept)
    residual, acc = torch.zeros_like(grad), torch.empty_like(grad)
    chosen = kernels.select(grad, threshold, 2 * kept)[0]
    assert chosen.indices is not None
    indices, values = chosen.indices.repeat(4), chosen.values.repeat(4)
    elements, entries = [], []
    for _ in range(4):
        fresh = grad.clone()
        comm.all_gather_size(0, device, stage="probe")  # begin together
        start = perf_counter()
        kernels.accumulate_select(residual, fresh, acc, threshold, 2 * kept)
        kernels.settle_(fresh, acc, chosen, chosen, comm.size)
        _finish_work(device)
        elements.append(perf_counter() - start)
        start = perf_counter()
        kernels.merge(indices, values, [chosen.num] * 4, 0, numel)
        _finish_work(device)
        entries.append(perf_counter() - start)
    taken = [min(elements) / numel, min(entries) / (4 * chosen.num)]
    return Machine(*_slowest(taken, comm, device))


def _finish_work(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(taken: list[float], comm: Comm, device: torch.device) -> list[float]:
    mine = torch.tensor(taken, dtype=torch.float64, device=device)
    return comm.all_gather(mine, stage="probe").amax(0).tolist()
