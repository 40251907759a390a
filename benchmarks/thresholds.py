# SPDX-License-Identifier: Apache-2.0
"""Ways to find the threshold that k entries reach, on gradients of real training.

    python benchmarks/thresholds.py

The GPT of the text task is trained for 500 steps at 2 % with error feedback, and at every step each
way chooses from the same accumulated gradient: how far its count is from k, how many of the true
top k it has, and what it costs on a vector of 27.6 million.

- exact: the k-th largest magnitude, every step.
- reused: the exact threshold of every 32nd step, as the paper has it.
- controlled: reused, and moved after every step by how far its count was off.
- sampled: the k-th of every 64th element, as much of k as that is.
- trimmed: what `oktopk` does: the last threshold finds 1.1 k candidates, trimmed to k by counting.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from experiment import Experiment
from oktopk import kernels
from oktopk.methods.base import MethodState
from oktopk.methods.ok_topk import near_exact, propose_candidates
from oktopk.methods.selection import top_k

DENSITY, STEPS, EVERY, STRIDE, LARGE = 0.02, 500, 32, 64, 27_569_568


class Reused:
    """The threshold of the last exact step; with a slope, corrected by every count."""

    def __init__(self, slope: float | None = None) -> None:
        self.slope, self.threshold, self.step = slope, 0.0, 0

    def __call__(self, acc: Tensor, k: int) -> Tensor:
        if self.step % EVERY == 0:
            self.threshold = kernels.kth_magnitude(acc, k)
        self.step += 1
        chosen, count = kernels.select(acc, self.threshold, acc.numel())
        if self.slope is not None:
            self.threshold *= (max(count, 1) / k) ** (1 / self.slope)
        return chosen.indices


def exact(acc: Tensor, k: int) -> Tensor:
    return top_k(acc, k)[0].indices


def sampled(acc: Tensor, k: int) -> Tensor:
    sample = acc[::STRIDE].contiguous()
    threshold = kernels.kth_magnitude(sample, max(1, k * sample.numel() // acc.numel()))
    return kernels.select(acc, threshold, acc.numel())[0].indices


class Trimmed:
    """As in a step of oktopk, but that the gradient has been added before."""

    def __init__(self) -> None:
        self.state = MethodState(exact_every=EVERY)

    def __call__(self, acc: Tensor, k: int) -> Tensor:
        candidates = propose_candidates(acc, k, self.state)
        if candidates is not None:
            candidates.add_bucket(acc, torch.zeros_like(acc), acc)
        chosen = near_exact(acc, k, self.state, candidates).indices
        self.state.step += 1
        return chosen


def ways() -> dict:
    return {
        "exact": exact,
        "reused": Reused(),
        "controlled": Reused(slope=4.0),
        "sampled": sampled,
        "trimmed": Trimmed(),
    }


def quality() -> dict[str, list[tuple[float, float]]]:
    """(count / k - 1, recall) of every step and way."""
    run = Experiment("text", ranks=1, steps=STEPS, batch=12)
    numels = [p.numel() for p in run.parameters]
    residual, k = torch.zeros(sum(numels)), round(DENSITY * sum(numels))
    table, seen = ways(), {name: [] for name in ways()}
    for (batch,) in run.batches():
        run.backward(batch)
        residual += torch.cat([p.grad.view(-1) for p in run.parameters])
        truth = exact(residual, k)
        for name, choose in table.items():
            chosen = choose(residual, k)
            recall = torch.isin(truth, chosen).float().mean().item()
            seen[name].append((chosen.numel() / k - 1, recall))
        applied = torch.zeros_like(residual)
        applied[truth] = residual[truth]
        residual[truth] = 0
        for parameter, part in zip(run.parameters, applied.split(numels), strict=True):
            parameter.grad = part.view_as(parameter)
        run.optimizer.step()
    return seen


def cost() -> dict[str, float]:
    """Median milliseconds of a step that is not an exact one, on one core."""
    torch.set_num_threads(1)
    acc = torch.randn(LARGE, generator=torch.Generator().manual_seed(0))
    k, taken = round(DENSITY * LARGE), {}
    for name, choose in ways().items():
        times = []
        for _ in range(6):
            start = time.perf_counter()
            choose(acc, k)
            times.append(1e3 * (time.perf_counter() - start))
        taken[name] = statistics.median(times[1:])
    return taken


def main() -> None:
    taken = cost()
    print(f"{'':12}{'count off by':>14}{'at worst':>10}{'recall':>9}{'worst':>8}{'ms':>8}")
    for name, steps in quality().items():
        off = [abs(error) for error, _ in steps]
        recall = [value for _, value in steps]
        print(
            f"{name:12}{statistics.mean(off):14.1%}{max(off):10.1%}"
            f"{statistics.mean(recall):9.3f}{min(recall):8.3f}{taken[name]:8.1f}"
        )


if __name__ == "__main__":
    main()
