# SPDX-License-Identifier: Apache-2.0
"""Float buffers, such as the running statistics of batch norm: averaged over ranks by local steps,
and put back after a step that no rank applied.

Only those that a state dict of the model has: others, such as rotary caches, are computed from the
model and equal on all ranks. Integer ones, such as counters, are each rank's own.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.adapters.thread import share
from oktopk.comm.communicator import Comm, equal_shares
from oktopk.errors import StateError
from oktopk.exchange.saved_state import clean_name
from oktopk.optim.staleness import local_shard
from oktopk.utils.device import to_device, to_host

log = logging.getLogger("oktopk")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STAGE = "buffers"
MISFIT = 1 << 20
"""Flag of a buffer that is gone, or of another shape or dtype than at the start: more than the
flags of any number of ranks that have only changed it."""


def float_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The float buffers that a state dict of the model has, by name, as they are now: assigning to
    a buffer replaces the tensor."""
    return {
        clean_name(f"{prefix}.{name}" if prefix else name): local_shard(x.detach())
        for prefix, module in model.named_modules()
        for name, x in module._buffers.items()
        if x is not None
        and x.dtype in FLOATS
        and x.layout == torch.strided
        and name not in module._non_persistent_buffers_set
    }


def described_buffers(model: nn.Module) -> dict[str, str]:
    """Names, shapes and dtypes of the float buffers, which must be the same on every rank."""
    found = float_buffers(model).items()
    return {"float buffers": " ".join(f"{name} {[*x.shape]} {x.dtype}" for name, x in found)}


class StepBuffers:
    """The float buffers as they were before the forward of a step, until the step has ended.

    A forward has changed them when a NaN shows in the gradients. A step may have several, with
    gradient accumulation: the first of them counts.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._before: dict[str, Tensor] | None = None
        """None between the end of a step and the next forward."""

        this = weakref.ref(self)  # the model must not keep memory for a handle that was dropped

        def note(*_: Any) -> None:
            if (buffers := this()) is not None:
                buffers._note()

        self._hook = None
        if model is not None and float_buffers(model):
            hook: Any = torch.compiler.disable(note)
            self._hook = model.register_forward_pre_hook(hook)

    def end_step(self, *, undo: bool) -> None:
        """End a step. To `undo` it, set the buffers back to those before its forward."""
        before, self._before = self._before, None
        if undo and before is not None:
            for x in before.values():
                share(x)
            _set(self._now, before)

    def close(self) -> None:
        """Remove the hook of the model."""
        if self._hook is not None:
            self._hook.remove()

    def _note(self) -> None:
        """Copy the buffers, if this is the first forward of a step."""
        if self._before is None and torch.is_grad_enabled():
            self._before = _copies(self._now)

    @property
    def _now(self) -> dict[str, Tensor]:
        model = None if self._model is None else self._model()
        return {} if model is None else float_buffers(model)


class RoundBuffers:
    """The float buffers of a model that is trained by local steps, and those after the last
    exchange: the anchor, the same bits on every rank.

    An exchange averages those that some rank has changed since the anchor, and a skipped one sets
    all of them back to it. They are no part of the outer step: an average of variances is one, and
    what momentum makes of them may be negative.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        """None for a fragment that has no buffers: they belong to the first one."""

        self._taken: dict[str, Tensor] = {}
        """At the launch of the exchange that is under way."""

        self.anchor: dict[str, Tensor] = {}
        """After the last exchange. Replaced and never changed in place."""

    @property
    def now(self) -> dict[str, Tensor]:
        """Those of the model, of the same shape and dtype as at the start."""
        found = {} if self._model is None else float_buffers(self._model)
        known = self.anchor
        return {name: x for name, x in found.items() if name in known and _fits(x, known[name])}

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, as they are sent."""
        return sum(x.numel() for x in self.anchor.values()) * _dtype(self.anchor.values()).itemsize

    def set_anchor(self) -> None:
        """Let the present buffers be the anchor. They must be the same on every rank."""
        self.anchor = {} if self._model is None else _copies(float_buffers(self._model))

    def take(self) -> None:
        """Note the buffers as the next exchange sends them: the model may change them meanwhile."""
        self._taken = _copies(self.now)
        for x in self._taken.values():
            share(x)

    def means(self, comms: Sequence[Comm], device: torch.device, where: str) -> dict[str, Tensor]:
        """The means over ranks of those that some rank has changed. Collective over each of
        `comms`, one after the other. An entry that is not finite any more stays as in the anchor.

        Header: 4 bytes for each buffer in an all-reduce. Payload: 2n(P-1)/P elements.
        """
        if not self.anchor:
            return {}
        flags = to_device([self._flag(name) for name in self.anchor], torch.int32, device)
        for comm in comms:
            flags = comm.all_reduce_header(flags, stage=STAGE)
        totals = dict(zip(self.anchor, to_host(flags)[0], strict=True))
        taken = {name: self._taken[name] for name, total in totals.items() if 0 < total < MISFIT}
        self._taken = {}
        if not taken:
            return {}
        self._log_nonfinite(taken, where)
        dtype = _dtype(taken.values())
        flat = torch.cat([x.to(device, dtype).flatten() for x in taken.values()])
        for comm in comms:  # in rank order: every rank gets the same bits
            mine = comm.reduce_scatter(equal_shares(flat, comm.size), stage=STAGE) / comm.size
            flat = comm.all_gather(mine, stage=STAGE).view(-1)[: flat.numel()]
        parts = flat.split([x.numel() for x in taken.values()])
        return {
            name: _finite_mean(part, self.anchor[name])
            for name, part in zip(taken, parts, strict=True)
        }

    def return_to_anchor(self) -> None:
        """Set the buffers to those after the last exchange."""
        _set(self.now, self.anchor)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Those of now, and the anchor."""
        return {"buffers": _copies(self.now), "buffer_anchor": dict(self.anchor)}

    def check(self, *saved: Mapping[str, Tensor]) -> None:
        """Raise StateError for buffers of a state that have other shapes."""
        for name, x in ((name, x) for each in saved for name, x in each.items()):
            if name in self.anchor and x.shape != self.anchor[name].shape:
                theirs, mine = tuple(x.shape), tuple(self.anchor[name].shape)
                raise StateError(
                    f"buffer {name!r} has the shape {theirs} in the state and {mine} here"
                )

    def load(self, buffers: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> None:
        """Take over those of a state; one that it does not have stays as it is now."""
        _set(self.now, buffers)
        self.set_anchor()
        self.anchor |= {
            name: anchor[name].to(mine.device, mine.dtype)
            for name, mine in self.anchor.items()
            if name in anchor
        }

    def _flag(self, name: str) -> int:
        """1 if this rank has changed a buffer, `MISFIT` if it has no longer one to average."""
        taken = self._taken.get(name)
        return MISFIT if taken is None else int(not torch.equal(taken, self.anchor[name]))

    def _log_nonfinite(self, taken: dict[str, Tensor], where: str) -> None:
        """Name the buffers of this rank that are not finite any more."""
        if bad := [name for name, x in taken.items() if bool(_lost(x, self.anchor[name]).any())]:
            log.warning(
                "%s: the buffers %s of this rank are not finite; such entries are set back to "
                "those of the last exchange on all ranks",
                where,
                ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else ""),
            )


def _dtype(buffers: Iterable[Tensor]) -> torch.dtype:
    """In which they are added up."""
    return reduce(torch.promote_types, (x.dtype for x in buffers), torch.float32)


def _finite_mean(flat: Tensor, anchor: Tensor) -> Tensor:
    mean = flat.view(anchor.shape).to(anchor.device, anchor.dtype)
    return torch.where(_lost(mean, anchor), anchor, mean)


def _lost(x: Tensor, anchor: Tensor) -> Tensor:
    """Where a buffer is not finite and was: a mask may have had Inf from the start."""
    return ~torch.isfinite(x) & torch.isfinite(anchor)


def _fits(x: Tensor, like: Tensor) -> bool:
    return x.shape == like.shape and x.dtype == like.dtype


@torch.no_grad()
def _set(buffers: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Overwrite the buffers that have another value, and still have the shape of it. An equal one
    is left alone: autograd may have saved it."""
    for name, x in buffers.items():
        value = values.get(name)
        if value is not None and x.shape == value.shape:
            value = value.to(x.device, x.dtype)
            if not torch.equal(x, value):
                x.copy_(value)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
