# SPDX-License-Identifier: Apache-2.0
"""Probes measure how good the selection was, every few steps, at the cost of a dense allreduce.

The accumulated gradients summed over ranks are the exchanged result plus the residuals summed over
ranks, because nothing is lost. So the dense sum, of which an exact selection would take the top k,
can be computed after the step from the residuals. The exchange is not involved: a run with probes
ends with the same bits as a run without.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from oktopk.adapters.ddp.handle import Handle
from oktopk.comm.communicator import Comm
from oktopk.methods.selection import top_k
from oktopk.runlog.schema import ProbeRecord


class Probe:
    """Measures every `every`-th step of the sparse phase.

    A probed step costs a copy of the residual, a dense allreduce of 2n entries, and an exact top k
    on every rank. Every other step costs one pass over the gradient, for the ages. Memory is n
    entries, and 4n in a probed step.
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
        self._residual: Tensor | None = None
        self._last: Tensor | None = None  # the step in which an entry was last exchanged

    def before(self, step: int) -> None:
        """Copy the residual if this step is probed. Called before backward."""
        due = (step + 1) % self._every == 0
        self._residual = self._flat(self._handle.residuals) if due else None

    def after(self) -> ProbeRecord | None:
        """Measure the step if it is probed. Called after backward, before gradients are changed.

        Collective. The result is the same on every rank, except for the ages.
        """
        stats = self._handle.stats
        if stats is None or stats.skipped:
            return None
        started = time.perf_counter()
        applied = self._flat({n: p.grad for n, p in self._parameters.items() if p.grad is not None})
        if self._last is None:
            self._last = torch.full_like(applied, stats.step - 1, dtype=torch.int32)
        # the dense phase exchanges every entry, also zeros
        exchanged = (applied != 0) | (stats.phase == "dense")
        self._last.masked_fill_(exchanged, stats.step)
        if stats.phase == "dense" or self._residual is None:
            return None
        residual = self._flat(self._handle.residuals)
        self._rescale(self._handle.driver.lr_factors)
        sums = torch.stack([residual, residual - self._residual])
        acc, grad = self._comm.all_reduce_(sums, stage="probe") / self._comm.size + applied
        # the exchange applies more than it selected by this factor, and puts it into the residual
        selected = applied / (1 + self._handle.settings.overshoot_at(stats.step))
        quality = selection_quality(acc, grad, selected, stats.k - self._num_dense)
        ages = self._ages(residual, stats.step)
        means = self._mean_ages(residual, stats.step)
        seconds = time.perf_counter() - started
        return ProbeRecord(step=stats.step, seconds=seconds, ages=means, **quality, **ages)

    def _rescale(self, factors: dict[str, float]) -> None:
        """Scale the copied residual as the exchange did when the learning rate changed."""
        assert self._residual is not None
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        for name, part in zip(self._parameters, self._residual.split(sizes), strict=True):
            part.mul_(factors.get(name, 1.0))

    def _ages(self, residual: Tensor, step: int) -> dict[str, float]:
        """Steps since the entries in this rank's residual were last exchanged."""
        assert self._last is not None
        since = (step - self._last).float()
        ages = since[residual != 0]
        if not len(ages):
            ages = since.new_zeros(1)
        rank = max(1, round(0.9 * len(ages)))
        return {
            "age_mean": ages.mean().item(),
            "age_90": ages.kthvalue(rank).values.item(),
            "age_most": ages.max().item(),
        }

    def _mean_ages(self, residual: Tensor, step: int) -> dict[str, float | None]:
        """The mean age by parameter; 0 where the residual is empty."""
        assert self._last is not None
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        since, waiting = (step - self._last).float().split(sizes), (residual != 0).split(sizes)
        parts = zip(self._parameters, since, waiting, strict=True)
        return {n: age[mask].mean().item() if mask.any() else 0.0 for n, age, mask in parts}

    def _flat(self, tensors: dict[str, Tensor]) -> Tensor:
        """A flat copy of the parameters that are exchanged sparsely; zeros where one is missing."""
        parts = [
            tensors[name].detach().flatten().float()
            if name in tensors
            else parameter.new_zeros(parameter.numel(), dtype=torch.float32)
            for name, parameter in self._parameters.items()
        ]
        return torch.cat(parts) if parts else torch.zeros(0)


def selection_quality(acc: Tensor, grad: Tensor, result: Tensor, k: int) -> dict[str, float]:
    """Compare a result with the exact top k of the mean `acc`. O(n) and one selection.

    `recall` is the share of the exact top k that is in the result. `energy` and `best_energy` are
    the shares of the sum of squares that the entries of the result and of the exact top k hold.
    `xi` is the distance of the result from the exact top k over the norm of the mean gradient.
    """
    best, _ = top_k(acc, min(k, acc.numel()))
    top = best.to_dense()
    num_best = torch.count_nonzero(top).item()
    whole, norm = _energy(acc), _energy(grad) ** 0.5
    distance = _energy(top - result) ** 0.5
    return {
        "recall": ((top != 0) & (result != 0)).sum().item() / num_best if num_best else 1.0,
        "energy": _energy(acc[result != 0]) / whole if whole else 1.0,
        "best_energy": _energy(best.values) / whole if whole else 1.0,
        "xi": distance / norm if norm else 0.0,
    }


def _energy(x: Tensor) -> float:
    """Sum of squares."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2
