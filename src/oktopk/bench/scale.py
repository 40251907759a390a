"""`oktopk bench --simulate P`: the same method code on more ranks than there are machines.

The ranks are threads of one process; what they send is counted, and a clock of latency and
bandwidth turns it into time. A simulated gradient is smaller than the real one: its payload is
scaled up, its headers are not. Beyond the ranks that can be simulated the formulas of `costs.py`
take over.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from oktopk.bench.stream import gradients
from oktopk.comm.communicator import Comm
from oktopk.comm.simulated import Hub, SimulatedTransport, simulate
from oktopk.methods import METHODS
from oktopk.methods.cost_model import KernelSpeed, Link, Work
from oktopk.reducer import Reducer
from oktopk.settings import num_kept
from oktopk.wire.codec import entry_bits

MOST = {"topka": 32, "oktopk": 256}  # ranks that are simulated; all ranks read all of topka
PER_RUN = 128  # entries of one rank for another, at least, so that words rounded up do not count
STEPS = {"topka": 1, "oktopk": 4}  # thresholds of oktopk settle in a few


class Clocked(SimulatedTransport):
    """A simulated rank that notes what every round would take."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self.rounds: list[int] = []

    def exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        sent = sum(message.nbytes for message in outgoing.values())
        received = sum(message.nbytes for message in incoming.values())
        self.rounds.append(max(sent, received))
        super().exchange(outgoing, incoming)

    def swap(self, x: Tensor, out: Tensor) -> None:
        self.rounds.append(0)  # headers: their bytes do not grow with the gradient
        super().swap(x, out)


@dataclass(frozen=True, slots=True)
class Scaled:
    """One method on P ranks."""

    method: str
    size: int
    bytes_sent: float
    """By a rank in a step, the mean of the ranks."""

    seconds: float
    simulated: bool


def scaled(
    method: str, size: int, numel: int, density: float, link: Link, speed: KernelSpeed
) -> Scaled:
    """A step of `numel` gradients on `size` ranks: simulated, or by formula where too many."""
    work = Work(numel, num_kept(numel, density), size, entry_bits("bf16", density))
    if size > MOST.get(method, 0):
        cost = METHODS[method].cost(work)
        return Scaled(method, size, cost.bytes, cost.seconds(link, speed), False)
    small = min(numel, max(2**16, round(PER_RUN * size / density)))
    factor = numel / small

    def main(comm: Comm) -> tuple[float, list[int]]:
        transport = comm.transport
        assert isinstance(transport, Clocked)
        reducer = Reducer(small, method=method, density=density, comm=comm)
        variants = gradients([small], comm.rank, 2)
        for step in range(STEPS[method] - 1):
            reducer.reduce_(variants[step % 2].clone())
        before = len(transport.rounds)
        stats = reducer.reduce_(variants[STEPS[method] % 2])
        payload = stats.bytes_sent - stats.bytes_header
        return payload * factor + stats.bytes_header, transport.rounds[before:]

    ranks = simulate(size, main, transport=Clocked)
    slowest = [max(taken) for taken in zip_longest(*(rounds for _, rounds in ranks), fillvalue=0)]
    network = sum(link.latency + factor * taken / link.bandwidth for taken in slowest)
    mean = sum(sent for sent, _ in ranks) / size
    seconds = network + METHODS[method].cost(work).kernel_seconds(speed)
    return Scaled(method, size, mean, seconds, True)


def show(most: int, numel: int, density: float, link: Link, speed: KernelSpeed) -> list[Scaled]:
    """Print how bytes and time grow with the number of ranks."""
    sizes = [size for size in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if size < most]
    sys.stdout.write(
        f"{numel:,} gradients, density {density:g}; {1e3 * link.latency:.2f} ms latency, "
    )
    sys.stdout.write(f"{8e-6 * link.bandwidth:.0f} Mbit/s per worker; MB sent by a worker and ms\n")
    names = ("dense", *STEPS)
    sys.stdout.write(f"{'workers':>8}" + "".join(f"{name:>22}" for name in names) + "\n")
    rows = []
    for size in [*sizes, most]:
        row = [scaled(name, size, numel, density, link, speed) for name in names]
        cells = [
            f"{r.bytes_sent / 1e6:12.2f}{1e3 * r.seconds:8.0f} {'' if r.simulated else '*':1}"
            for r in row
        ]
        sys.stdout.write(f"{size:8}" + "".join(cells) + "\n")
        sys.stdout.flush()
        rows += row
    sys.stdout.write("* by formula\n")
    return rows
