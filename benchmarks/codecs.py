# SPDX-License-Identifier: Apache-2.0
"""What every codec costs and loses on gradients of real training.

    python benchmarks/codecs.py               # at 2 %, in about two minutes
    python benchmarks/codecs.py --density 0.01

A GPT on the source of Python's standard library and the speech model on synthesized speech. Four
ranks in one process train each with AdamW and error feedback, and exchange exactly. The selections
of one rank (`local`) and the sums that are kept (`result`) are what codecs see; they are taken at
three steps. The floor of positions is the entropy of indices that lie evenly. Indices in clusters
can take less. What training makes of it: `python benchmarks/pareto.py text --only oktopk`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch

from experiment import Experiment
from oktopk import kernels, wire
from oktopk.methods.selection import top_k
from oktopk.sparse import Sparse
from oktopk.wire import CODECS, CodecName, EntryRange

TASKS = ("text", "speech")
RANKS, WARMUP, TAKEN_AT, MILLION = 4, 20, (30, 75, 150), 1_000_000


def floor_of_positions(density: float) -> float:
    """The entropy of an index in bits, when entries lie evenly."""
    return -(math.log2(density) + (1 / density - 1) * math.log2(1 - density))


def selections(task: str, density: float) -> dict[str, list[Sparse]]:
    """What ranks select, and what they keep of the sums, in a training with error feedback."""
    experiment = Experiment(task, RANKS, steps=max(TAKEN_AT) + 1, optimizer="adamw")
    numel = sum(p.numel() for p in experiment.parameters)
    residual, k = torch.zeros(RANKS, numel), round(density * numel)
    taken: dict[str, list[Sparse]] = {"local": [], "result": []}
    for step, batches in enumerate(experiment.batches()):
        acc = residual + experiment.gradients(batches)
        if step < WARMUP:
            experiment.apply_(acc.mean(0))
            continue
        local = [top_k(row, k)[0] for row in acc]
        sent = torch.stack([each.to_dense() for each in local])
        result = top_k(sent.sum(0), k)[0]
        if step in TAKEN_AT:
            taken["local"].append(local[0])
            taken["result"].append(result)
        dense = result.to_dense()
        residual = acc - sent * (dense != 0)
        experiment.apply_(dense / RANKS)
    return taken


def encoded(entries: Sparse, name: CodecName) -> wire.Encoded:
    whole = EntryRange(entries.num, 0, entries.numel)
    return wire.encode(entries.indices, entries.values, whole, name)


def bits(entries: Sparse, name: CodecName) -> float:
    return 32 * encoded(entries, name).words.numel() / entries.num


def energy_lost(entries: Sparse, name: CodecName) -> float:
    """The share of the squares that rounding leaves to the residual."""
    lost = entries.values - encoded(entries, name).values
    return float(lost.square().sum() / entries.values.square().sum())


def a_million(some: list[Sparse]) -> Sparse:
    """Selections one after the other, again and again, until there are a million entries."""
    repeats = -(-MILLION // sum(each.num for each in some))
    indices, values, start = [], [], 0
    for each in some * repeats:
        indices.append(each.indices + start)
        values.append(each.values)
        start += each.numel
    return Sparse(torch.cat(indices)[:MILLION], torch.cat(values)[:MILLION], start)


def milliseconds(run: Callable[[], object]) -> float:
    run()  # compiles, and touches the memory
    taken = []
    for _ in range(25):
        start = time.perf_counter()
        run()
        taken.append(1e3 * (time.perf_counter() - start))
    return min(taken)


def costs(entries: Sparse, name: CodecName) -> tuple[float, float, float]:
    """Milliseconds to encode a million entries and to decode them, on one core; and those of
    decoding in which the indices are checked."""
    words, _, told = encoded(entries, name)
    indices, values = torch.empty_like(entries.indices), torch.empty_like(entries.values)
    encode = milliseconds(lambda: encoded(entries, name))
    decode = milliseconds(lambda: wire.decode(words, told, name, indices, values))
    check = milliseconds(lambda: kernels.ascend_within(indices, told.lo, told.hi))
    return encode, decode, check


def show(density: float) -> None:
    columns = {
        f"{task} {kind}": some for task in TASKS for kind, some in selections(task, density).items()
    }
    floor = floor_of_positions(density)
    print(f"floor of positions that lie evenly at {density:.0%}: {floor:.2f} bits\n")
    title = "".join(f"{name:>20}" for name in columns)
    print(f"{'bits, energy lost':18}{title}{'encode':>10}{'decode':>8}{'check':>8}")
    everything = a_million([each for some in columns.values() for each in some])
    for name in CODECS:
        row = f"{name:18}"
        for some in columns.values():
            mean_bits = statistics.mean(bits(each, name) for each in some)
            mean_lost = statistics.mean(energy_lost(each, name) for each in some)
            row += f"{mean_bits:12.2f}{mean_lost:8.2%}"
        encode, decode, check = costs(everything, name)
        print(f"{row}{encode:10.1f}{decode:8.1f}{check:8.2f}", flush=True)
    print("\nencode, decode: milliseconds for a million of these entries, one core")
    print("check: those of decode in which the indices are checked, as they came from another rank")


def main() -> None:
    parser = argparse.ArgumentParser(description="Bits, energy and cost of every codec.")
    parser.add_argument("--density", type=float, default=0.02)
    args = parser.parse_args()
    torch.set_num_threads(1)
    show(args.density)


if __name__ == "__main__":
    main()
