# SPDX-License-Identifier: Apache-2.0
"""`Reducer`: the five moves on one flat gradient, for people without DDP."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from msgspec import to_builtins
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from oktopk.comm.communicator import Comm
from oktopk.comm.consistency import check_consistency
from oktopk.comm.simulated import single_rank_comm
from oktopk.comm.torch_transport import TorchTransport, as_process_group
from oktopk.exchange import saved_state
from oktopk.exchange.engine import Engine
from oktopk.exchange.layout import MAX_INDEXABLE, Bucket
from oktopk.methods.base import SHORT_BYTES, Average
from oktopk.settings import DENSITY, WIRE, OnNonfinite, Settings
from oktopk.stats import Phase, StepStats
from oktopk.utils.arguments import integer, short_repr
from oktopk.wire import CodecName


def default_comm(group: dist.ProcessGroup | DeviceMesh | None = None) -> Comm:
    """Over a process group, the default one, or of one rank when there is none."""
    if group is None and not dist.is_initialized():
        return single_rank_comm()
    return Comm(TorchTransport(None if group is None else as_process_group("group", group)))


class Reducer:
    """Average a flat gradient over all ranks, sending only its largest entries.

    Use it where there is no `DistributedDataParallel` model to attach to. Every rank must make one
    with the same arguments; the first call of `reduce_` compares them.

    Args:
        numel: elements of the gradient, the same on every rank.
        method: a name of `oktopk.METHODS`.
        density: fraction of the entries that is kept, in (0, 1].
        warmup_steps: dense steps before the sparse phase.
        schedule: (steps, density) pairs that follow the warm-up, before `density` holds.
        overshoot: deliver this much more of every sum than was accumulated, in [0, 1]; it is taken
            off the residual (`oktopk.Settings`).
        average: divide a sum by the number of `all` ranks, or of the `senders` of that entry.
        decay: multiply the residual by this before each exchange, in [0, 1]; 1 is plain error
            feedback.
        wire: how entries travel: `plain`, `fp32`, `bf16`, `fp16`, `int8`, `int4`, `int2` or `sign`.
        exact_every: steps between exact thresholds (`oktopk`).
        bounds_every: steps between updates of the region bounds (`oktopk`).
        short_bytes: bytes that a rank may send in a short exchange of two rounds (`oktopk`).
        on_nonfinite: what all ranks do when one has a NaN or Inf: `skip`, `raise` or `deliver`.
        group: the process group, or a mesh of one dimension; None is the default group, or this
            process alone.
        comm: a communicator instead of `group`, for instance of simulated ranks
            (`oktopk.simulate`).

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, `group` and `comm` are both given, or `numel` is
            more than int32 can index.
    """

    def __init__(
        self,
        numel: int,
        *,
        method: str = "oktopk",
        density: float = DENSITY,
        warmup_steps: int = 0,
        schedule: tuple[tuple[int, float], ...] = (),
        overshoot: float = 0.0,
        average: Average = "all",
        decay: float = 1.0,
        wire: CodecName = WIRE,
        exact_every: int = 32,
        bounds_every: int = 64,
        short_bytes: int = SHORT_BYTES,
        on_nonfinite: OnNonfinite = "skip",
        group: dist.ProcessGroup | DeviceMesh | None = None,
        comm: Comm | None = None,
    ) -> None:
        if group is not None and comm is not None:
            raise ValueError("pass group or comm, not both")
        if comm is not None and not isinstance(comm, Comm):
            raise TypeError(f"comm must be an oktopk Comm, got {short_repr(comm)}")
        if (numel := integer("numel", numel, least=0)) > MAX_INDEXABLE:
            raise ValueError(
                f"numel must be from 0 to 2**31 - 1, as indices are int32, got {numel}: "
                "split the gradient over several reducers"
            )
        self.settings = Settings(
            method=method,
            density=density,
            warmup_steps=warmup_steps,
            schedule=schedule,
            overshoot=overshoot,
            average=average,
            decay=decay,
            wire=wire,
            exact_every=exact_every,
            bounds_every=bounds_every,
            short_bytes=short_bytes,
            on_nonfinite=on_nonfinite,
        )
        self.numel = numel
        self.comm = comm or default_comm(group)
        self._engine = Engine(self.settings, self.comm, [Bucket(numel)])
        self._agreed = False

    @property
    def step(self) -> int:
        """Finished steps."""
        return self._engine.step

    @property
    def phase(self) -> Phase:
        """The phase of the next step."""
        return self._engine.plan().phase

    @property
    def k(self) -> int:
        """Entries the next step is to keep."""
        return self._engine.plan().k

    @property
    def residual(self) -> Tensor:
        """This rank's residual: fp32 (float64 for float64 gradients), zero before any step."""
        residual = self._engine.residual
        return torch.zeros(self.numel) if residual is None else residual

    def reduce_(self, grad: Tensor) -> StepStats:
        """Replace `grad` by the average over ranks, the same bits on all. Blocks.

        Every rank must call it with the same size and dtype; the first call checks that together.
        After an error the residual is as before the call, and the content of `grad` is undefined.

        Args:
            grad: a flat, contiguous tensor of `numel` elements in fp16, bf16, fp32 or float64.

        Returns:
            What the step did: bytes, entries, thresholds and seconds.

        Raises:
            TypeError: `grad` is not a dense tensor of one of these dtypes.
            ValueError: `grad` has another shape, or the ranks disagree about settings, size or
                dtype; then all of them raise.
            ExchangeError: a message could not be sent or did not arrive.
            NonfiniteError: a rank had a NaN or Inf, and `on_nonfinite` is `raise`.
        """
        if not isinstance(grad, Tensor):
            raise TypeError(
                f"rank {self.comm.global_rank}: expected a tensor, got {type(grad).__name__}"
            )
        grad = grad.detach()
        self._check(grad)
        step = self._engine.begin(grad)
        try:
            step.add_bucket(0, grad)
            stats = self._engine.finish(step)
        except BaseException:
            step.discard()
            raise
        self._engine.raise_if_asked(stats)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, as tensors and plain numbers.

        The residual is this rank's own, so every rank must save its own state.
        """
        with self._engine.lock.reading():
            residual = self._engine.residual
            return {
                "format": saved_state.FORMAT,
                "numel": self.numel,
                "method": self.settings.method,
                "size": self.comm.size,
                "residual": None if residual is None else residual.clone(),
                "engine": to_builtins(self._engine.save()),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: the same bits as a run that never stopped.

        Args:
            state: what `state_dict` returned on this rank.

        Raises:
            ValueError: the state is of another size, method or number of ranks, of another version
                of the format, or it is damaged. Nothing has changed then.
        """
        here = {"numel": self.numel, "method": self.settings.method, "size": self.comm.size}
        engine, residual = saved_state.load_flat(state, here)
        with self._engine.lock.changing():
            self._engine.residual = None if residual is None else residual.clone()
            self._engine.load(engine)
        self._agreed = False  # the ranks may have loaded different states

    def _check(self, grad: Tensor) -> None:
        if not self._agreed:  # all ranks find out together, before one of them waits for another
            values = asdict(self.settings) | {
                "numel": self.numel,
                "step": self.step,
                "state": self._engine.shared(),
                "residual dtype": str(self.residual.dtype),
                "gradient shape": list(grad.shape),
                "gradient dtype": str(grad.dtype),
                "gradient device": grad.device.type,
                "gradient is contiguous": grad.is_contiguous(),
            }
            has_data = grad.device.type != "meta"
            check_consistency(self.comm, grad.device if has_data else torch.device("cpu"), values)
            self._agreed = True
        check_gradient(grad, self.numel, f"rank {self.comm.global_rank}, step {self.step}")


def check_gradient(grad: Tensor, numel: int, where: str) -> None:
    """Raise an error that names what is wrong with a gradient."""
    if grad.device.type == "meta" or grad.layout != torch.strided:
        what = "without data" if grad.device.type == "meta" else f"with layout {grad.layout}"
        raise TypeError(f"{where}: gradients must be dense tensors, got one {what}")
    if not grad.is_floating_point() or grad.dtype.itemsize < 2:
        raise TypeError(f"{where}: gradients must be fp16, bf16, fp32 or float64, got {grad.dtype}")
    if grad.shape != (numel,) or not grad.is_contiguous():
        raise ValueError(
            f"{where}: expected a flat contiguous gradient of {numel} elements, "
            f"got shape {tuple(grad.shape)}, strides {grad.stride()}"
        )
