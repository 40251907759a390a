# SPDX-License-Identifier: Apache-2.0
"""What the kernels of one core cost beside reading the tensor once, and beside plain torch.

    python benchmarks/selection.py
    python benchmarks/selection.py --numel 1000000 --density 0.01 --repeats 20

The default size is that of the LSTM of the paper (27.6 million weights). All rows are run in turn,
`repeats` times over, so a slow moment of the machine hits them all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np
import torch
from torch import Tensor

from oktopk import kernels

NUM_PARTS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str

    run: Callable[[], object]

    prepare: Callable[[], object] = lambda: None
    """Runs before each measurement, outside of it."""


@numba.njit
def read_all(words):
    """Touch every value once and do next to nothing with it, front to back as the kernels do."""
    total = np.uint64(0)
    for i in range(words.size):
        total ^= words[i]
    return total


def read_limit(x: Tensor) -> Row:
    words = x[: x.numel() // 2 * 2].numpy().view(np.uint64)
    return Row("read limit", lambda: read_all(words))


def torch_select(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    indices = (x.abs() >= threshold).nonzero().squeeze(1)
    return indices, x[indices]


def threshold_rows(x: Tensor, k: int) -> list[Row]:
    magnitudes = x.abs()  # torch gets them for nothing
    rank = x.numel() - k + 1
    return [
        Row("kth_magnitude", lambda: kernels.kth_magnitude(x, k)),
        Row("  torch.kthvalue", lambda: magnitudes.kthvalue(rank)),
        Row("  torch.topk", lambda: magnitudes.topk(k, sorted=False)),
    ]


def select_rows(x: Tensor, k: int) -> list[Row]:
    threshold = kernels.kth_magnitude(x, k)
    return [
        Row("select", lambda: kernels.select(x, threshold, 2 * k)),
        Row("  torch abs, compare, nonzero, gather", lambda: torch_select(x, threshold)),
    ]


def accumulate_rows(start: Tensor, grad: Tensor, k: int) -> list[Row]:
    """Every measurement adds to the same residual, so that each keeps exactly k."""
    threshold = kernels.kth_magnitude(start + grad, k)
    residual, fresh, acc = start.clone(), grad.clone(), torch.empty_like(start)

    def restart() -> None:
        residual.copy_(start)
        fresh.copy_(grad)

    def fused() -> None:
        _, count = kernels.accumulate_select(residual, fresh, acc, threshold, 2 * k)
        assert count == k, f"kept {count}, not {k}"

    def separate() -> None:
        torch_select(residual.add_(fresh), threshold)

    return [
        Row("torch add_", lambda: residual.add_(fresh), restart),
        Row("all_finite", lambda: kernels.all_finite(fresh), restart),
        Row("accumulate_select", fused, restart),
        Row("  torch add_, abs, compare, nonzero, gather", separate, restart),
    ]


def exchange_rows(x: Tensor, grad: Tensor, k: int) -> list[Row]:
    """What follows the selection: summing the parts of one region, and applying the result."""
    threshold = kernels.kth_magnitude(x, k)
    hi = x.numel() // NUM_PARTS
    parts = [kernels.select(part, threshold, hi)[0] for part in x[: hi * NUM_PARTS].split(hi)]
    indices = torch.cat([part.indices for part in parts])
    values = torch.cat([part.values for part in parts])
    splits = [part.num for part in parts]
    local, _ = kernels.select(x, threshold, 2 * k)
    result, _ = kernels.select(grad, kernels.kth_magnitude(grad, k), 2 * k)
    reduced, residual = grad.clone(), x.clone()
    return [
        Row("merge", lambda: kernels.merge(indices, values, splits, 0, hi)),
        Row(
            "apply_result_",
            lambda: kernels.apply_result_(reduced, residual, result, local, NUM_PARTS),
        ),
    ]


def milliseconds(row: Row) -> float:
    row.prepare()
    start = time.perf_counter()
    row.run()
    return 1e3 * (time.perf_counter() - start)


def measure(rows: list[Row], repeats: int) -> dict[str, list[float]]:
    for row in rows:
        milliseconds(row)  # compiles, and touches the memory
    rounds = [[milliseconds(row) for row in rows] for _ in range(repeats)]
    return {
        row.name: list(times) for row, times in zip(rows, zip(*rounds, strict=True), strict=True)
    }


def show(times: dict[str, list[float]]) -> None:
    best = {name: min(row) for name, row in times.items()}
    width = max(map(len, times))
    print(f"{'':{width}}  {'best ms':>9}  {'median ms':>9}  {'x read':>7}")
    for name, row in times.items():
        ratio = best[name] / best["read limit"]
        print(f"{name:{width}}  {best[name]:9.1f}  {statistics.median(row):9.1f}  {ratio:7.1f}")
    fused = best["accumulate_select"] / best["torch add_"]
    kth = best["  torch.kthvalue"] / best["kth_magnitude"]
    print()
    print(f"accumulate_select / torch add_:  {fused:5.2f}  (aim: at most 1.7)")
    print(f"torch.kthvalue / kth_magnitude:  {kth:5.2f}  (aim: at least 8)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the kernels on one core.")
    parser.add_argument("--numel", type=int, default=27_569_568)
    parser.add_argument("--density", type=float, default=0.02)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    k = max(int(args.numel * args.density), 1)
    x, grad = torch.randn(args.numel), torch.randn(args.numel)
    rows = [
        read_limit(x),
        *accumulate_rows(x, grad, k),
        *select_rows(x, k),
        *threshold_rows(x, k),
        *exchange_rows(x, grad, k),
    ]
    print(f"{args.numel:,} values, {k:,} kept, one core, {args.repeats} rounds\n")
    show(measure(rows, args.repeats))


if __name__ == "__main__":
    main()
