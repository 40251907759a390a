# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model: by name, where they lie, which travel dense, and checks of
arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import timeout_of
from oktopk.exchange.layout import Bucket
from oktopk.exchange.saved_state import clean_name
from oktopk.utils.arguments import number, short_repr

# Which parameters travel dense: rules by shape, size and name.


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Which parameters travel dense. By default biases, norms and tiny tensors do.

    They are a fraction of a percent of a model, and much depends on them. Pass a policy to `attach`
    or `local_steps` as `policy=`.
    """

    vectors: bool = True
    """Parameters with fewer than two dimensions (biases, norms) travel dense."""

    below: int = 2048
    """Parameters with fewer elements than this travel dense."""

    patterns: tuple[str, ...] = ()
    """Parameters whose name matches one of these shell patterns travel dense."""

    sparse_patterns: tuple[str, ...] = ()
    """Parameters whose name matches one of these are sparse whatever the other rules say."""

    def is_dense(self, name: str, parameter: Tensor) -> bool:
        """Whether a parameter travels dense under these rules."""
        if any(fnmatchcase(name, pattern) for pattern in self.sparse_patterns):
            return False
        small = parameter.numel() < self.below or (self.vectors and parameter.ndim < 2)
        return small or any(fnmatchcase(name, pattern) for pattern in self.patterns)


# `ParameterLayout`: the parameters of a model by name, and where they lie in flat buckets.


class ParameterLayout:
    """Names outlive a layout: buckets may be rebuilt, and a resumed run may cut others."""

    def __init__(
        self, named: Mapping[str, Tensor], policy: Policy, *, may_be_unused: bool = False
    ) -> None:
        self._names: dict[Tensor, str] = {p: clean_name(name) for name, p in named.items()}
        self.parameters = {name: p for p, name in self._names.items() if p.requires_grad}
        """Those that are trained: a frozen one has no gradient, so it needs no residual."""

        for name, p in self.parameters.items():
            _check_memory(name, p)
        self._may_be_unused = may_be_unused
        """Whether a parameter may have no gradient in a step on any rank."""

        self._policy = policy

    @property
    def device(self) -> torch.device:
        """Of the parameters; a loaded state may be on another one."""
        return next(iter(self.parameters.values())).device

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters that are not trained."""
        return [name for name in self._names.values() if name not in self.parameters]

    def is_dense(self, name: str) -> bool:
        return self._policy.is_dense(name, self.parameters[name])

    @property
    def dense(self) -> list[str]:
        """Names of the parameters that travel dense."""
        return [name for name in self.parameters if self.is_dense(name)]

    def stored(self) -> dict[str, Tensor]:
        """What this rank stores of the parameters, by name."""
        return self.parameters

    def marks(self) -> dict[str, tuple[int, int]]:
        """What tells, without a read, that a parameter was written: how often it was, as autograd
        counts, and where it lies. `p.data` has no part in that count."""
        return {name: (p._version, p.data_ptr()) for name, p in self.parameters.items()}

    def part(self, names: Collection[str]) -> Self:
        """The layout of some of the trained parameters, beside all that are frozen."""
        part = copy(self)
        part._names = {
            p: name
            for p, name in self._names.items()
            if name in names or name not in self.parameters
        }
        part.parameters = {name: p for name, p in self.parameters.items() if name in names}
        return part

    @property
    def num_sparse(self) -> int:
        """Entries that this rank stores and that travel sparse, without padding."""
        return sum(x.numel() for name, x in self.stored().items() if not self.is_dense(name))

    def numel(self, name: str) -> int:
        """Entries of a parameter in its bucket."""
        return self.parameters[name].numel()

    def bucket(self, names: list[str]) -> Bucket:
        """Where in a bucket of these parameters the dense ones lie."""
        start, dense, sparse = 0, [], []
        for name in names:
            ranges = dense if self.is_dense(name) else sparse
            ranges.append((start, start + self.numel(name)))
            start += self.numel(name)
        return Bucket(start, tuple(dense), tuple(sparse) if self._may_be_unused else ())

    def views(self, flat: Tensor, names: list[str]) -> dict[str, Tensor]:
        """The parts of a flat bucket, each in its parameter's shape, laid out as DDP does."""
        return {
            name: part.as_strided(self.parameters[name].shape, _strides(self.parameters[name]))
            for name, part in self.parts(flat, names).items()
        }

    def parts(self, flat: Tensor, names: list[str]) -> dict[str, Tensor]:
        """The parts of a flat bucket, flat, in the order they lie in memory."""
        numels = [self.numel(name) for name in names]
        return dict(zip(names, flat.split(numels), strict=True))


def _check_memory(name: str, parameter: Tensor) -> None:
    """Raise TypeError for a parameter without memory for each of its entries."""
    if is_lazy(parameter):
        raise TypeError(
            f"parameter {name!r} has no shape yet, as those of lazy modules: run a forward first"
        )
    sizes = zip(parameter.shape, parameter.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in sizes):
        raise TypeError(
            f"parameter {name!r} is expanded: several of its entries share memory, so that they "
            "cannot be set; make it of a tensor's clone()"
        )


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Those of its gradient in DDP's bucket: its own if it fills its memory, else contiguous ones.

    It does fill it (as a channels_last one does) where a tensor like it gets the same strides.
    """
    like = torch.empty_like(parameter, device="meta")
    if like.stride() == parameter.stride():
        return like.stride()
    return torch.empty_like(like, memory_format=torch.contiguous_format).stride()


# Checks of arguments that several adapters take, before a rank waits for another.


MOST_SECONDS = 10**7  # about four months: larger ones overflow in the C++ of the process group


def time_limit(timeout: Any, group: dist.ProcessGroup | None) -> float:
    """A time limit; None is that of the process group."""
    if timeout is None:
        return min(timeout_of(group), MOST_SECONDS)
    limit = number("timeout", timeout, "more than 0 seconds")
    if not 0 < limit <= MOST_SECONDS:
        raise ValueError(
            f"timeout must be more than 0 seconds and at most {MOST_SECONDS}, got {timeout}"
        )
    return limit


def check_types(*, policy: object, on_step: object, comm: object) -> None:
    """Raise TypeError or ValueError for arguments of other types, or a communicator in use."""
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy must be an oktopk.Policy, got {short_repr(policy)}")
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step must be a function of a StepStats, got {short_repr(on_step)}")
    if comm is None:
        return
    if not isinstance(comm, Comm):
        raise TypeError(f"comm must be an oktopk.Comm, got {short_repr(comm)}")
    if comm.is_attached:
        raise ValueError("this comm serves another attached model: close() its handle first")


def check_devices(parameters: Collection[Tensor], backends: str, call: str) -> None:
    """Raise TypeError where the parameters are not on one device that the process group serves.

    `backends` are those of the process group, `cpu:gloo,cuda:nccl` for instance.
    """
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise TypeError(
            f"the parameters are on several devices ({', '.join(devices)}): {call} needs all of "
            "them on one, with one process for each device"
        )
    kind = devices[0].split(":")[0]
    by_kind = dict(part.split(":") for part in backends.split(",") if part)
    if kind != "cpu" and by_kind.get(kind) == "gloo":
        raise TypeError(
            f"the parameters are on {devices[0]} and the process group is gloo, which sends from "
            "rank to rank on CPUs only: use init_process_group('nccl'), or a model on the CPU"
        )


def check_optimizer(optimizer: Optimizer, parameters: Iterable[Tensor], advice: str) -> None:
    """Raise ValueError, with advice, for an optimizer that has none of these parameters."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if trained.isdisjoint(id(p) for p in parameters):
        name = type(optimizer).__name__
        raise ValueError(f"{name} has none of the model's parameters: {advice}")


def is_on_cuda(model: nn.Module) -> bool:
    """Whether the messages travel by NCCL."""
    return any(parameter.is_cuda for parameter in model.parameters())
