# SPDX-License-Identifier: Apache-2.0
"""`oktopk bench --advise`: predicted times of every method, from a short measurement."""

from __future__ import annotations

import math
import sys

from oktopk.comm.communicator import Comm
from oktopk.launch.network import UNSHAPED
from oktopk.methods import METHODS
from oktopk.methods.cost_model import KernelSpeed, Link, Work
from oktopk.methods.prediction import break_even
from oktopk.settings import num_kept
from oktopk.wire.codec import CodecName

UNITS = {"tbit": 1e12, "gbit": 1e9, "mbit": 1e6, "kbit": 1e3, "bit": 1.0}


def bits_per_second(rate: str) -> float:
    """Return 2e8 for `"200mbit"`, and so on for all units of `tc`."""
    unit = next(unit for unit in UNITS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * UNITS[unit]


def advise(
    numel: int, density: float, step_ms: float, rates: list[str], comm: Comm, speed: KernelSpeed,
    link: Link, codec: CodecName,
) -> None:  # fmt: skip
    """Print the table of predicted times; `link` is this network as measured."""
    say = sys.stdout.write if comm.rank == 0 else len
    work = Work(numel, num_kept(numel, density), comm.size, codec)
    links = {
        f"{rate}": Link(link.latency, min(bits_per_second(rate) / 8, link.bandwidth))
        for rate in rates
        if rate != UNSHAPED
    }
    links["here"] = link
    say(f"{comm.size} workers, {numel:,} gradients, density {density:g}, ")
    say(f"{step_ms:g} ms of compute\n")
    say(f"measured here: {1e3 * link.latency:.2f} ms latency, ")
    say(f"{8e-6 * link.bandwidth:.0f} Mbit/s sent per worker while all send, kernels ")
    say(f"{1e9 * speed.per_element:.2f} ns per element, ")
    say(f"{1e9 * speed.per_entry:.1f} per entry\n\n")
    say("predicted milliseconds per step, nothing overlapped\n")
    say(f"{'method':10}" + "".join(f"{name:>10}" for name in links) + "   faster than dense\n")
    for name, method in METHODS.items():
        cost = method.cost(work)
        times = [step_ms + 1e3 * cost.seconds(its, speed) for its in links.values()]
        edge = break_even(name, work, link.latency, speed)
        say(f"{name:10}" + "".join(f"{time:10.0f}" for time in times))
        say(f"   {'' if name == 'dense' else _below(edge)}\n")


def _below(bytes_per_second: float) -> str:
    if bytes_per_second == math.inf:
        return "always"
    if bytes_per_second == 0:
        return "never"
    return f"below {8e-6 * bytes_per_second:,.0f} Mbit/s per worker"
