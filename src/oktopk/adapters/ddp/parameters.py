"""`ParameterLayout`: the parameters DDP exchanges, by name, and where they lie in its buckets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.ddp.communication_thread import ReadyBucket
from oktopk.adapters.policy import Policy
from oktopk.engine.buckets import Bucket, Layout
from oktopk.engine.saved_state import clean_name


class ParameterLayout:
    """Names outlive a layout: DDP rebuilds its buckets, and a resumed run may cut others."""

    def __init__(self, model: DistributedDataParallel, policy: Policy) -> None:
        managed = {id(parameter) for parameter in model._module_parameters}
        self._names: dict[Tensor, str] = {
            parameter: clean_name(name)
            for name, parameter in model.module.named_parameters()
            if id(parameter) in managed
        }
        self.parameters = {name: p for p, name in self._names.items() if p.requires_grad}
        """Those that are trained: a frozen one has no gradient, so it needs no residual."""

        self._finds_unused = model.find_unused_parameters
        self._policy = policy

    @property
    def device(self) -> torch.device:
        """Of the parameters; a loaded state may be on another one."""
        return next(iter(self.parameters.values())).device

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters that are not trained."""
        return [name for name in self._names.values() if name not in self.parameters]

    def layout_of(self, buckets: list[ReadyBucket]) -> Layout:
        for ready in buckets:
            for parameter in ready.parameters:  # one that was frozen after DDP had taken it on
                self.parameters.setdefault(self._names[parameter], parameter)
        return [[self._names[p] for p in ready.parameters] for ready in buckets]

    def check_sizes(self, buckets: list[ReadyBucket], layout: Layout) -> None:
        """Raise where a bucket of DDP's is not as large as its parameters: all would be misread."""
        for ready, names in zip(buckets, layout, strict=True):
            numel = sum(self.parameters[name].numel() for name in names)
            if ready.buffer.numel() != numel:
                raise ValueError(
                    f"DDP's bucket {ready.index} has {ready.buffer.numel()} elements, and its "
                    f"parameters have {numel}: {names}; is one of them complex?"
                )

    def is_dense(self, name: str) -> bool:
        return self._policy.is_dense(name, self.parameters[name])

    def bucket(self, names: list[str]) -> Bucket:
        """Where in a bucket of these parameters the dense ones lie."""
        start, dense, sparse = 0, [], []
        for name in names:
            parameter = self.parameters[name]
            ranges = dense if self.is_dense(name) else sparse
            ranges.append((start, start + parameter.numel()))
            start += parameter.numel()
        return Bucket(start, tuple(dense), tuple(sparse) if self._finds_unused else ())

    def views(self, flat: Tensor, names: list[str]) -> dict[str, Tensor]:
        """The parts of a flat bucket, each in its parameter's shape, laid out as DDP does."""
        return {
            name: part.as_strided(self.parameters[name].shape, _strides(self.parameters[name]))
            for name, part in self._parts(flat, names).items()
        }

    def copies(self, buckets: list[ReadyBucket], layout: Layout) -> list[Tensor]:
        """A copy of DDP's gradients in the order of another layout."""
        parts = self._gradients(buckets)
        return [torch.cat([parts[name] for name in names]) for names in layout]

    def copy_back(self, copies: list[Tensor], buckets: list[ReadyBucket], layout: Layout) -> None:
        """Copy the averages from the copies back into DDP's buckets."""
        parts = self._gradients(buckets)
        for names, grad in zip(layout, copies, strict=True):
            for name, part in self._parts(grad, names).items():
                parts[name].copy_(part)

    def _gradients(self, buckets: list[ReadyBucket]) -> dict[str, Tensor]:
        parts = {}
        for ready, names in zip(buckets, self.layout_of(buckets), strict=True):
            parts |= self._parts(ready.buffer, names)
        return parts

    def _parts(self, flat: Tensor, names: list[str]) -> dict[str, Tensor]:
        """The parts of a flat bucket, flat, in the order they lie in memory."""
        numels = [self.parameters[name].numel() for name in names]
        return dict(zip(names, flat.split(numels), strict=True))


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Those of its gradient in DDP's bucket: its own if it fills its memory, else contiguous ones.

    It does fill it (as a channels_last one does) where a tensor like it gets the same strides.
    """
    like = torch.empty_like(parameter, device="meta")
    if like.stride() == parameter.stride():
        return like.stride()
    return torch.empty_like(like, memory_format=torch.contiguous_format).stride()
