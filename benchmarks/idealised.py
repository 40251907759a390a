# SPDX-License-Identifier: Apache-2.0
"""Variants of error feedback with an idealised exchange, all ranks in one process.

The exchange is the exact top k of the sum of the exact local top k.

    python benchmarks/idealised.py text adamw
    python benchmarks/idealised.py text adamw --variants moments beta1 ramp
    python benchmarks/idealised.py text sgd --lr 0.1 --variants correction

The script tries variants that are not in the library, without the approximations of a real
exchange. docs/experiments.md has the results.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor

from experiment import Experiment
from oktopk import kernels
from oktopk.optim.staleness import shares
from oktopk.settings import num_kept, ramp

RANKS = 4
VARIANTS = {
    "rate": "residuals follow the learning rate",
    "advance": "deliver 30 % more than was saved up, and owe it",
    "moments": "Adam's second moment takes a late sum as many gradients",
    "beta1": "Adam's first beta is 0.5 in the sparse phase",
    "ramp": "20 dense steps, then from 25 % down; without it, dense for a tenth of the steps",
    "update": "select by |acc| / sqrt(v), not by |acc|",
    "correction": "DGC: momentum before the exchange, and masking of what was sent",
    "predict": "send only what differs from a shared prediction, 1 % of each sum, for 50 steps",
    "flush": "everything is delivered every 50 steps",
    "decay": "residuals lose 5 % at every step",
    "clip": "every rank clips its own gradient, to a norm of 1 over the root of the ranks",
    "layers": "every tensor keeps its own share, not the model as a whole",
    "ends": "selection takes the first and the last weights for three times as large",
    "age": "select by |acc| times the steps it has waited",
    "frozen": "1-bit Adam: momentum before the exchange, the second moment stays as it was",
}


class Run:
    """One training. `step` is one exchange and one optimizer step."""

    def __init__(self, seed: int, args: argparse.Namespace) -> None:
        changed = {"optimizer": args.optimizer} | ({"lr": args.lr} if args.lr else {})
        self.experiment = Experiment(args.task, RANKS, seed, args.steps, **changed)
        self.has, self.steps = set(args.variants), self.experiment.steps
        self.parameters, self.optimizer = self.experiment.parameters, self.experiment.optimizer
        numel = sum(p.numel() for p in self.parameters)
        self.owed, self.momentum = torch.zeros(RANKS, numel), torch.zeros(RANKS, numel)
        self.predicted = torch.zeros(numel)
        self.arrived = torch.full((numel,), -1, dtype=torch.int32)
        self.rides = torch.cat([torch.full((p.numel(),), p.dim() < 2) for p in self.parameters])
        weights = [i for i, p in enumerate(self.parameters) if p.dim() > 1]
        ends = [3.0 if i in (weights[0], weights[-1]) else 1.0 for i in range(len(self.parameters))]
        sizes = [p.numel() for p in self.parameters]
        self.ends = torch.tensor(ends).repeat_interleave(torch.tensor(sizes))
        self.rate = 0.0
        self.due: tuple[Tensor, Tensor] | None = None
        self.warmup = 20 if "ramp" in self.has else self.steps // 10
        stairs = ramp(self.steps // 2, args.density) if "ramp" in self.has else ()
        self.densities = [density for steps, density in stairs for _ in range(steps)]
        self.densities += [args.density] * self.steps

    def step(self, step: int, batches: list[Any]) -> None:
        acc = self.experiment.gradients(batches)
        rate = self.optimizer.param_groups[0]["lr"]
        if "rate" in self.has and self.rate:
            self.owed *= self.rate / rate
        self.rate = rate
        sparse_step = step - self.warmup
        if "clip" in self.has:
            acc *= (RANKS**-0.5 / acc.norm(dim=1, keepdim=True)).clamp(max=1)
        if "correction" in self.has and sparse_step >= 0:
            acc = self.momentum.mul_(0.9).add_(acc)
        if "frozen" in self.has and sparse_step >= 0:
            if sparse_step == 0:  # every rank goes on with what the warm-up has
                self.momentum[:] = self._moments("exp_avg")
            beta = self.optimizer.param_groups[0]["betas"][0]
            acc = self.momentum.mul_(beta).add_(acc, alpha=1 - beta).clone()
        acc = acc + self.owed - self.predicted
        if sparse_step < 0 or ("flush" in self.has and sparse_step % 50 == 49):
            total, self.owed = acc.sum(0), torch.zeros_like(acc)
            self.arrived[:] = step
        else:
            total = self._exchange(acc, self.densities[sparse_step], step)
            self._correct_moments(total / RANKS, step)
        self._apply(total / RANKS + self.predicted, sparse_step)
        if "predict" in self.has and sparse_step >= 0:
            self.predicted = 0.98 * self.predicted + 0.01 * total / RANKS

    def _exchange(self, acc: Tensor, density: float, step: int) -> Tensor:
        """The sum that is delivered; `owed` becomes what is not."""
        weight = self._weight(step)
        offered = self._choose(acc * weight, density)
        sums = (acc * offered).sum(0)
        kept = offered & self._choose(sums[None] * weight, density)
        advance = 0.3 * (1 - density) if "advance" in self.has else 0.0
        self.owed = acc - (1 + advance) * acc * kept
        if "decay" in self.has:
            self.owed *= 0.95
        if "correction" in self.has:
            self.momentum *= ~kept
        return (1 + advance) * (acc * kept).sum(0)

    def _weight(self, step: int) -> Tensor | float:
        """What selection multiplies magnitudes by."""
        weight: Tensor | float = 1.0
        if "update" in self.has:
            weight = weight * self._moments().rsqrt().clamp(max=1e12)
        if "age" in self.has:
            weight = weight * (step - self.arrived).float()
        return weight * self.ends if "ends" in self.has else weight

    def _choose(self, rows: Tensor, density: float) -> Tensor:
        """Where the entries of every row are that travel: biases and norms always do."""
        rows = rows.masked_fill(self.rides, 0)
        parts = self._split(rows, 1) if "layers" in self.has else [rows]
        chosen = [_top(part, num_kept(part.shape[1], density)) for part in parts]
        return torch.cat(chosen, 1) | self.rides

    def _moments(self, kind: str = "exp_avg_sq") -> Tensor:
        moments = [self.optimizer.state[p][kind] for p in self.parameters]
        return torch.cat([moment.flatten() for moment in moments])

    def _correct_moments(self, mean: Tensor, step: int) -> None:
        """As `oktopk.moments`: lower before the step, set after it."""
        if "moments" in self.has:
            beta = self.optimizer.param_groups[0]["betas"][1]
            share, now = shares(beta, step + 2, mean.device), self._moments()
            late = kernels.SecondMoment(mean, now, self.arrived, share, beta)
            ((where, _, after),) = kernels.correct_second_moments_([late], step)
            self._set_moments(now)
            self.due = where, after
        self.arrived[mean != 0] = step

    def _set_moments(self, flat: Tensor) -> None:
        for parameter, part in zip(self.parameters, self._split(flat), strict=True):
            self.optimizer.state[parameter]["exp_avg_sq"].copy_(part.view_as(parameter))

    def _apply(self, mean: Tensor, sparse_step: int) -> None:
        group = self.optimizer.param_groups[0]
        if "beta1" in self.has and sparse_step >= 0:
            group["betas"] = (0.5, group["betas"][1])
        if "correction" in self.has and sparse_step >= 0:
            group["momentum"] = 0.0
        if "frozen" in self.has and sparse_step >= 0:
            self._apply_frozen(mean, group)
            return
        self.experiment.apply_(mean)
        if self.due is not None:
            self._set_moments(self._moments().index_copy(0, *self.due))
            self.due = None

    @torch.no_grad()
    def _apply_frozen(self, mean: Tensor, group: dict[str, Any]) -> None:
        seen = 1 - group["betas"][1] ** self.warmup
        square = self._moments() / seen
        # what had no gradient in the warm-up has no scale: DeepSpeed leaves it out too
        update = torch.where(square > 0, mean / (square.sqrt() + group["eps"]), 0.0)
        for parameter, part in zip(self.parameters, self._split(update), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(part.view_as(parameter), alpha=-group["lr"])

    def _split(self, flat: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        return flat.split([p.numel() for p in self.parameters], dim)


def _top(rows: Tensor, k: int) -> Tensor:
    """Where the k largest magnitudes of every row are."""
    places = rows.abs().topk(k, dim=1, sorted=False).indices
    return torch.zeros_like(rows, dtype=torch.bool).scatter_(1, places, True)


def train(seed: int, args: argparse.Namespace) -> list[float]:
    """The metric at every eighth of the run."""
    run = Run(seed, args)
    found = []
    for step, batches in enumerate(run.experiment.batches()):
        run.step(step, batches)
        if (step + 1) % max(1, run.steps // 8) == 0:
            found.append(run.experiment.metric())
    return found


def main() -> None:
    torch.set_num_threads(1)
    told = "\n".join(f"  {name:10}  {text}" for name, text in VARIANTS.items())
    parser = argparse.ArgumentParser(
        description=f"Variants of error feedback:\n{told}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", choices=("text", "images"))
    parser.add_argument("optimizer", choices=["sgd", "adamw"])
    parser.add_argument("--variants", nargs="*", default=[], choices=VARIANTS)
    parser.add_argument("--density", type=float, default=0.02)
    parser.add_argument("--lr", type=float, help="instead of the task's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=0)
    args = parser.parse_args()
    if "frozen" in args.variants and (args.optimizer != "adamw" or "ramp" in args.variants):
        parser.error("frozen is for adamw, after a warm-up that is long enough: without ramp")
    curves = [train(seed, args) for seed in args.seeds]
    means = [statistics.mean(points) for points in zip(*curves, strict=True)]
    name = " ".join(args.variants) or "plain"
    at = f" lr {args.lr:g}" if args.lr else ""
    print(f"{args.task} {args.optimizer} {args.density:g} {name}{at}:", end=" ")
    print(" ".join(f"{mean:.4f}" for mean in means), flush=True)


if __name__ == "__main__":
    main()
