"""Was the right part of the gradient kept? A look every so many steps, at the price of dense ones.

By the first law the sum over ranks of what was accumulated is what was delivered plus what is still
owed. So the dense sum that a perfect selection would have seen can be had after the step, from the
residuals: nothing in the exchange knows of it, and a run with probes has the bits of one without.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from oktopk.adapters.ddp.handle import Handle
from oktopk.comm.communicator import Comm
from oktopk.methods.selection import top_k
from oktopk.stats import StepStats


class Probe:
    """Looks at every `every`-th step of the sparse phase.

    Costs in such a step: one copy of the residual, a dense sum of 2n over the ranks, and an exact
    top k on every rank; in every other one: a pass over the applied gradient, for ages. One n of
    memory, four in a step that looks.
    """

    def __init__(
        self,
        every: int,
        parameters: dict[str, torch.nn.Parameter],
        handle: Handle,
        comm: Comm,
    ) -> None:
        dense = set(handle.dense_parameters)
        self._every, self._comm, self._handle = every, comm, handle
        self._parameters = {n: p for n, p in parameters.items() if n not in dense}
        self._num_dense = sum(p.numel() for n, p in parameters.items() if n in dense)
        self._owed: Tensor | None = None
        self._last: Tensor | None = None  # the step an entry last arrived in, -1 before any

    def before(self, step: int) -> None:
        """To be called before backward. Reads only."""
        due = (step + 1) % self._every == 0
        self._owed = self._flat(self._handle.residuals) if due else None  # none yet: zeros

    def after(self, stats: StepStats) -> dict[str, Any] | None:
        """To be called after backward, before anything changes the gradients. Collective.

        What was found, where it was due; the same on every rank but for the ages.
        """
        if stats.skipped:
            return None
        started = time.perf_counter()
        applied = self._flat({n: p.grad for n, p in self._parameters.items() if p.grad is not None})
        if self._last is None:
            self._last = torch.full_like(applied, stats.step - 1, dtype=torch.int32)
        # in the dense phase zeros arrive too
        arrived = (applied != 0) | (stats.phase == "dense")
        self._last.masked_fill_(arrived, stats.step)
        if stats.phase == "dense" or self._owed is None:
            return None
        owed = self._flat(self._handle.residuals)
        self._follow(self._handle.driver.lr_factors)
        sums = torch.stack([owed, owed - self._owed])
        acc, grad = self._comm.all_reduce_(sums, stage="probe") / self._comm.size + applied
        # what is applied is so much more than what was selected, and is owed
        selected = applied / (1 + self._handle.settings.overshoot_at(stats.step))
        found = judge(acc, grad, selected, stats.k - self._num_dense)
        ages = self._ages(owed, stats.step)
        seconds = time.perf_counter() - started
        return {"kind": "probe", "step": stats.step, "seconds": seconds} | found | ages

    def _follow(self, factors: dict[str, float]) -> None:
        """What was owed counted for so much more in this step."""
        assert self._owed is not None
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        for name, part in zip(self._parameters, self._owed.split(sizes), strict=True):
            part.mul_(factors.get(name, 1.0))

    def _ages(self, owed: Tensor, step: int) -> dict[str, Any]:
        """Steps since what this rank owes last arrived: of all entries, and means by tensor."""
        assert self._last is not None
        waiting, since = owed != 0, (step - self._last).float()
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        parts = zip(since.split(sizes), waiting.split(sizes), strict=True)
        means = [part[mask].mean().item() if mask.any() else 0.0 for part, mask in parts]
        old = since[waiting]
        if not len(old):
            old = since.new_zeros(1)
        rank = max(1, round(0.9 * len(old)))
        return {
            "age_mean": old.mean().item(),
            "age_90": old.kthvalue(rank).values.item(),
            "age_most": old.max().item(),
            "ages": dict(zip(self._parameters, means, strict=True)),
        }

    def _flat(self, tensors: dict[str, Tensor]) -> Tensor:
        """A copy of what travels sparse, in the order of the parameters."""
        parts = [
            tensors[name].detach().flatten().float()
            if name in tensors
            else parameter.new_zeros(parameter.numel(), dtype=torch.float32)
            for name, parameter in self._parameters.items()
        ]
        return torch.cat(parts) if parts else torch.zeros(0)


def judge(acc: Tensor, grad: Tensor, result: Tensor, k: int) -> dict[str, float]:
    """A result against the true top k of the mean `acc`. O(n) and one selection.

    `recall` is the share of the true top k that is in the result; `energy` and `best_energy` are
    the shares of the sum of squares that the entries of the result and of the true top k hold. `xi`
    is the distance of the result from the true top k over the norm of the mean gradient.
    """
    best, _ = top_k(acc, min(k, acc.numel()))
    top = best.to_dense()
    wanted = torch.count_nonzero(top).item()
    whole, norm = _energy(acc), _energy(grad) ** 0.5
    distance = _energy(top - result) ** 0.5
    return {
        "recall": ((top != 0) & (result != 0)).sum().item() / wanted if wanted else 1.0,
        "energy": _energy(acc[result != 0]) / whole if whole else 1.0,
        "best_energy": _energy(best.values) / whole if whole else 1.0,
        "xi": distance / norm if norm else 0.0,
    }


def _energy(x: Tensor) -> float:
    """Sum of squares."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2
