# SPDX-License-Identifier: Apache-2.0
"""`ParameterLayout`: the parameters of a model by name, and where they lie in flat buckets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from typing import Self

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from oktopk.adapters.policy import Policy
from oktopk.engine.buckets import Bucket
from oktopk.engine.saved_state import clean_name


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
