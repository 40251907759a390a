# SPDX-License-Identifier: Apache-2.0
"""`oktopk bench --simulate P`: the same method code on more ranks than there are machines.

The ranks are threads of one process. The bytes that they send are counted, and converted to time
by the latency and bandwidth of a link. A simulated gradient is smaller than the real one: its
payload is scaled up, its headers are not. For more ranks than can be simulated, the method's cost
model is used instead (`methods.cost_model`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import zip_longest

from torch import Tensor

from oktopk.adapters.local_steps.outer_step import SHARED_METHOD
from oktopk.baselines.sparseloco import num_words
from oktopk.bench.stream import gradients
from oktopk.comm.communicator import Comm
from oktopk.comm.simulated import SimulatedGroup, SimulatedTransport, simulate
from oktopk.methods import METHODS
from oktopk.methods.cost_model import KernelSpeed, Link, Work
from oktopk.methods.ok_topk.short_path import is_short
from oktopk.reducer import Reducer
from oktopk.settings import num_kept
from oktopk.wire.codec import CodecName

MAX_SIMULATED = {"topka": 32, "oktopk": 256}  # ranks; with topka every rank reads all entries
MIN_ENTRIES = 128  # that a rank sends to another, so that rounding up to words does not matter
NO_LIMIT = 2**40  # bytes
STEPS = {"topka": 1, "oktopk": 4}  # oktopk's thresholds need a few steps to settle


class TimedTransport(SimulatedTransport):
    """The transport of a simulated rank that records the bytes of every round."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        super().__init__(group, rank)
        self.rounds: list[int] = []

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        sent = sum(message.nbytes for message in outgoing.values())
        received = sum(message.nbytes for message in incoming.values())
        self.rounds.append(max(sent, received))
        super().exchange(outgoing, incoming)

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        self.rounds.append(0)  # headers: their bytes do not grow with the gradient
        super().all_to_all(x, out)


@dataclass(frozen=True, slots=True)
class Compressed:
    """A gradient, the fraction of it that is kept, and how entries travel."""

    numel: int
    density: float
    wire: CodecName = "bf16"

    def on(self, size: int) -> Work:
        """Its exchange between so many ranks."""
        return Work(self.numel, num_kept(self.numel, self.density), size, self.wire)


@dataclass(frozen=True, slots=True)
class ScaledStep:
    """A step of one method on P ranks."""

    method: str
    size: int
    bytes_sent: float
    """Bytes sent by a rank: the mean of the ranks."""

    seconds: float
    simulated: bool


def scaled(
    method: str, size: int, gradient: Compressed, link: Link, speed: KernelSpeed
) -> ScaledStep:
    """Return the cost of a step on `size` ranks: simulated, or by formula if there are too many."""
    work, density = gradient.on(size), gradient.density
    if size > MAX_SIMULATED.get(method, 0):
        cost = METHODS[method].cost(work)
        return ScaledStep(method, size, cost.sent, cost.seconds(link, speed), False)
    small = min(gradient.numel, max(2**16, round(MIN_ENTRIES * size / density)))
    factor = gradient.numel / small
    short_bytes = NO_LIMIT if is_short(work) else 0  # the smaller gradient goes the same way

    def main(comm: Comm) -> tuple[float, list[int]]:
        transport = comm.transport
        assert isinstance(transport, TimedTransport)
        options = {"method": method, "wire": gradient.wire, "short_bytes": short_bytes}
        reducer = Reducer(small, density=density, comm=comm, **options)
        variants = gradients([small], comm.rank, 2)
        for step in range(STEPS[method] - 1):
            reducer.reduce_(variants[step % 2].clone())
        before = len(transport.rounds)
        stats = reducer.reduce_(variants[STEPS[method] % 2])
        payload = stats.bytes_sent - stats.bytes_header
        return payload * factor + stats.bytes_header, transport.rounds[before:]

    ranks = simulate(size, main, transport=TimedTransport)
    slowest = [max(taken) for taken in zip_longest(*(rounds for _, rounds in ranks), fillvalue=0)]
    network = sum(link.latency + factor * taken / link.bandwidth for taken in slowest)
    mean = sum(sent for sent, _ in ranks) / size
    seconds = network + METHODS[method].cost(work).kernel_seconds(speed)
    return ScaledStep(method, size, mean, seconds, True)


def local(step: ScaledStep, name: str, every: int) -> ScaledStep:
    """An exchange as one of every few steps: what it costs for each of them."""
    return replace(
        step, method=name, bytes_sent=step.bytes_sent / every, seconds=step.seconds / every
    )


def sparseloco(size: int, gradient: Compressed, link: Link, speed: KernelSpeed) -> ScaledStep:
    """An exchange of SparseLoCo, by formula: its messages all have the size of their chunks.

    Its values always have 2 bits.
    """
    sent = 4.0 * num_words(gradient.numel, gradient.density) * (size - 1)
    work = gradient.on(size)
    kernels = work.numel * speed.per_element + work.kept * size * speed.per_entry
    seconds = link.latency + sent / link.bandwidth + kernels
    return ScaledStep("sparseloco", size, sent, seconds, False)


def rows_of(
    size: int, gradient: Compressed, link: Link, speed: KernelSpeed, every: int
) -> list[ScaledStep]:
    """All methods on `size` ranks. Local steps exchange every few steps, each rank its share.

    By formula, since simulated gradients have more in common than weight changes: the selections of
    ranks would overlap, and make the union of them look smaller than it is.
    """
    given = size, gradient, link, speed
    share = replace(gradient, density=gradient.density / size)
    each_step = {name: scaled(name, *given) for name in ("dense", *STEPS)}
    return [
        *each_step.values(),
        local(scaled(SHARED_METHOD, size, share, link, speed), "local_steps", every),
        local(sparseloco(*given), "sparseloco", every),
    ]


def show(
    most: int, gradient: Compressed, link: Link, speed: KernelSpeed, every: int
) -> list[ScaledStep]:
    """Print how bytes and time grow with the number of ranks."""
    sizes = [size for size in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if size < most]
    sys.stdout.write(
        f"{gradient.numel:,} gradients, density {gradient.density:g} as {gradient.wire}; "
        f"{1e3 * link.latency:.2f} ms latency, "
    )
    sys.stdout.write(f"{8e-6 * link.bandwidth:.0f} Mbit/s per worker; MB sent by a worker and ms ")
    sys.stdout.write(f"per step; local_steps and sparseloco exchange every {every}\n")
    names = ("dense", *STEPS, "local_steps", "sparseloco")
    sys.stdout.write(f"{'workers':>8}" + "".join(f"{name:>22}" for name in names) + "\n")
    rows = []
    for size in [*sizes, most]:
        row = rows_of(size, gradient, link, speed, every)
        cells = [
            f"{r.bytes_sent / 1e6:12.3f}{1e3 * r.seconds:8.1f} {'' if r.simulated else '*':1}"
            for r in row
        ]
        sys.stdout.write(f"{size:8}" + "".join(cells) + "\n")
        sys.stdout.flush()
        rows += row
    sys.stdout.write("* by formula\n")
    return rows
