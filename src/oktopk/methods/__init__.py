# SPDX-License-Identifier: Apache-2.0
"""The methods by name, and which of them is fastest here. A new method is a file here and a row."""

from __future__ import annotations

import math
from time import perf_counter

import torch

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.methods import allgather, dense, gtopk, ok_topk, topkdsa
from oktopk.methods import allgather as topka
from oktopk.methods.base import KernelSpeed, Link, Method, Work
from oktopk.utils.device import to_device

# The methods by name. A new method is a file here and a row, and every law is tested on it.


__all__ = ["METHODS"]

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        dense.METHOD,
        topka.TOPKA,
        allgather.GAUSSIANK,
        topkdsa.METHOD,
        gtopk.METHOD,
        ok_topk.METHOD,
    )
}
"""The methods by name: `dense`, `topka`, `gaussiank`, `topkdsa`, `gtopk`, `oktopk`."""


# Which method is fastest here: probes of the network and the kernels, and predicted times.


MEGABYTE = 2**20

AUTO_CHOICES = ("dense", "topka", "oktopk")
"""What `method="auto"` chooses from."""


def break_even(method: str, work: Work, latency: float, speed: KernelSpeed) -> float:
    """Bytes per second below which a method is faster than dense; infinite if it always is."""
    dense, other = METHODS["dense"].cost(work), METHODS[method].cost(work)
    saved = dense.bytes - other.bytes
    spent = (other.rounds - dense.rounds) * latency + other.kernel_seconds(speed)
    if saved <= 0:
        return 0.0
    return saved / spent if spent > 0 else math.inf


def cheapest(work: Work, link: Link, speed: KernelSpeed) -> dict[str, float]:
    """The choices of `auto` and their predicted seconds, the fastest first."""
    times = {name: METHODS[name].cost(work).seconds(link, speed) for name in AUTO_CHOICES}
    return dict(sorted(times.items(), key=lambda item: item[1]))


def probe_link(comm: Comm, device: torch.device, rounds: int = 3) -> Link:
    """Measure the network with all ranks at once. Every rank gets the slowest rank's figures.

    Sends about 16 MB for each round, whatever the number of ranks.
    """
    peers = max(comm.size - 1, 1)
    small = torch.zeros(1, device=device)
    large = torch.zeros(max(4 * MEGABYTE // peers, 2**14), device=device)
    taken = []
    for x, repeats in ((small, 20), (large, rounds)):
        comm.all_gather_header(x, stage="probe")
        _synchronize(device)
        start = perf_counter()
        for _ in range(repeats):
            comm.all_gather_header(x, stage="probe")
        _synchronize(device)
        taken.append(max((perf_counter() - start) / repeats, 1e-9))
    latency, large_seconds = agree_on_slowest(taken, comm, device)
    return Link(latency, large.nbytes * peers / max(large_seconds - latency, 1e-9))


def probe_kernels(comm: Comm, device: torch.device, numel: int = 2**21) -> KernelSpeed:
    """Measure the kernels on all ranks at once, since ranks may share cores; the slowest counts."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(numel, generator=generator).to(device)
    kept = numel // 50
    threshold = kernels.kth_magnitude(grad, kept)
    residual, acc = torch.zeros_like(grad), torch.empty_like(grad)
    chosen = kernels.select(grad, threshold, 2 * kept)[0]
    indices, values = chosen.indices.repeat(4), chosen.values.repeat(4)
    elements, entries = [], []
    for _ in range(4):
        x = grad.clone()
        comm.all_gather_size(0, device, stage="probe")  # so that all ranks start together
        start = perf_counter()
        kernels.accumulate_select(residual, x, acc, threshold, 2 * kept)
        kernels.apply_result_(x, acc, chosen, chosen, comm.size)
        _synchronize(device)
        elements.append(perf_counter() - start)
        start = perf_counter()
        kernels.merge(indices, values, [chosen.num] * 4, 0, numel)
        _synchronize(device)
        entries.append(perf_counter() - start)
    taken = [min(elements) / numel, min(entries) / (4 * chosen.num)]
    return KernelSpeed(*agree_on_slowest(taken, comm, device))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def agree_on_slowest(taken: list[float], comm: Comm, device: torch.device) -> list[float]:
    """The largest of every rank's seconds, the same on every rank. Collective."""
    mine = to_device(taken, torch.float64, device)
    return comm.all_gather_header(mine, stage="probe").amax(0).tolist()
