"""`Reducer`: the five moves on one flat gradient, with warm-up, statistics and state."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.comm import Comm, TorchTransport
from oktopk.feedback import settle_
from oktopk.handshake import agree
from oktopk.ledger import Traffic, dense_allreduce
from oktopk.methods import METHODS, Method, State
from oktopk.simulate import alone
from oktopk.sparse import Sparse
from oktopk.stats import Phase, StepStats

MOST = 2**31 - 1  # indices are int32 on the wire


def num_kept(numel: int, density: float) -> int:
    """k: the density's share of n, at least one entry of a gradient that has any."""
    return min(numel, max(1, round(density * numel)))


def default_comm(group: dist.ProcessGroup | None = None) -> Comm:
    """Over a process group, the default one, or alone when there is none."""
    if group is None and not dist.is_initialized():
        return alone()
    return Comm(TorchTransport(group))


class Reducer:
    """Average a flat gradient over all ranks, sending only its largest entries.

    Args:
        numel: elements of the gradient, the same on every rank.
        method: a name of `oktopk.METHODS`.
        density: fraction of the entries that is kept, in (0, 1].
        warmup_steps: dense steps before the sparse phase.
        group: the process group; None is the default group, or this process alone.
        exact_every: steps between exact thresholds (`oktopk`).
        bounds_every: steps between agreements on region bounds (`oktopk`).
        comm: instead of `group`, for simulated ranks (`oktopk.simulate`).
    """

    def __init__(
        self,
        numel: int,
        *,
        method: str = "oktopk",
        density: float = 0.02,
        warmup_steps: int = 0,
        group: dist.ProcessGroup | None = None,
        exact_every: int = 32,
        bounds_every: int = 64,
        comm: Comm | None = None,
    ) -> None:
        _check_settings(numel, method, density, warmup_steps, exact_every, bounds_every)
        self.numel = numel
        self.method = method
        self.density = density
        self.warmup_steps = warmup_steps
        self.k = num_kept(numel, density)
        self.comm = comm or default_comm(group)
        self.step = 0
        self._state = State(exact_every=exact_every, bounds_every=bounds_every)
        self._residual: Tensor | None = None
        self._agreed = False

    @property
    def phase(self) -> Phase:
        """The phase of the next step."""
        dense = self.step < self.warmup_steps or self.method == "dense"
        return "dense" if dense else "sparse"

    @property
    def residual(self) -> Tensor:
        """What this rank still owes: fp32 (float64 for float64 gradients), zero before any step."""
        return torch.zeros(self.numel) if self._residual is None else self._residual

    def reduce_(self, grad: Tensor) -> StepStats:
        """Replace `grad` by the average over ranks, the same bits on all. Blocks.

        Every rank must call it with the same size and dtype; the first call checks that together.
        """
        grad = grad.detach()
        self._check(grad)
        before = self.comm.ledger.snapshot()
        method, k = self._plan(grad)
        clock = [perf_counter()]
        local = method.select(self._residual, grad, k, self._state)
        clock.append(perf_counter())
        exchanged = method.exchange(local, k, self._state, self.comm)
        clock.append(perf_counter())
        # before the residual is settled: a dense result is the gradient's own memory
        thresholds = smallest_magnitude(local), smallest_magnitude(exchanged.result)
        settle_(grad, self._residual, local, exchanged, self.comm.size)
        clock.append(perf_counter())
        stats = StepStats(
            step=self.step,
            phase=self.phase,
            numel=self.numel,
            k=k,
            local=local.num,
            result=exchanged.result.num,
            local_threshold=thresholds[0],
            global_threshold=thresholds[1],
            imbalance=exchanged.imbalance,
            **_bill(self.comm.ledger.since(before)),
            bytes_dense=dense_allreduce(self.numel * acc_dtype(grad).itemsize, self.comm.size).sent,
            **_times(clock),
        )
        self.step += 1
        return stats

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, as tensors and plain numbers."""
        return {
            "numel": self.numel,
            "step": self.step,
            "residual": None if self._residual is None else self._residual.clone(),
            "method": self.method,
            "state": self._state.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: the same bits as a run that never stopped."""
        for name, mine in {"numel": self.numel, "method": self.method}.items():
            if state[name] != mine:
                raise ValueError(f"the state was saved with {name}={state[name]}, this is {mine}")
        self.step = state["step"]
        self._residual = None if state["residual"] is None else state["residual"].clone()
        self._state.load_state_dict(state["state"])

    def _plan(self, grad: Tensor) -> tuple[Method, int]:
        if self.phase == "dense":
            return METHODS["dense"], self.numel
        if self._residual is None:
            self._residual = torch.zeros_like(grad, dtype=acc_dtype(grad))
        return METHODS[self.method], self.k

    def _check(self, grad: Tensor) -> None:
        if not self._agreed:  # all ranks find out together, before one of them waits for another
            agree(
                self.comm,
                grad.device,
                {
                    "numel": self.numel,
                    "method": self.method,
                    "density": self.density,
                    "warmup_steps": self.warmup_steps,
                    "exact_every": self._state.exact_every,
                    "bounds_every": self._state.bounds_every,
                    "step": self.step,
                    "gradient shape": list(grad.shape),
                    "gradient dtype": str(grad.dtype),
                },
            )
            self._agreed = True
        where = f"rank {self.comm.rank}, step {self.step}"
        if not grad.is_floating_point() or grad.dtype.itemsize < 2:
            raise TypeError(f"{where}: gradients must be floating point, got {grad.dtype}")
        if grad.shape != (self.numel,) or not grad.is_contiguous():
            raise ValueError(
                f"{where}: expected a flat contiguous gradient of {self.numel} elements, "
                f"got shape {tuple(grad.shape)}, strides {grad.stride()}"
            )


def acc_dtype(grad: Tensor) -> torch.dtype:
    """Residuals and sums are fp32; float64 for float64 gradients."""
    return torch.promote_types(grad.dtype, torch.float32)


def smallest_magnitude(sparse: Sparse) -> float:
    """The threshold in effect; 0 when everything or nothing is kept. O(num)."""
    if sparse.indices is None or not sparse.num:
        return 0.0
    return sparse.values.abs().min().item()


def _bill(traffic: dict[str, Traffic]) -> dict[str, Any]:
    total = sum(traffic.values(), Traffic())
    return {
        "bytes_sent": total.sent,
        "bytes_header": total.header_sent,
        "bytes_received": total.received,
        "messages": total.messages_sent,
        "stages": {stage: part for stage, part in traffic.items() if part != Traffic()},
    }


def _times(clock: list[float]) -> dict[str, Any]:
    start, selected, arrived, end = clock
    return {
        "select": selected - start,
        "exchange": arrived - selected,
        "scatter": end - arrived,
        "exposed": end - start,
    }


def _check_settings(
    numel: int, method: str, density: float, warmup_steps: int, exact_every: int, bounds_every: int
) -> None:
    if not 0 <= numel <= MOST:
        raise ValueError(
            f"numel must be from 0 to 2**31 - 1, as indices are int32, got {numel}: "
            "split the gradient over several reducers"
        )
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; known methods: {', '.join(METHODS)}")
    if not 0 < density <= 1:  # a NaN fails too
        raise ValueError(f"density must be in (0, 1], got {density}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be 0 or more, got {warmup_steps}")
    for name, every in {"exact_every": exact_every, "bounds_every": bounds_every}.items():
        if every < 1:
            raise ValueError(f"{name} must be 1 or more, got {every}")
