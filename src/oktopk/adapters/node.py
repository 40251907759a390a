# SPDX-License-Identifier: Apache-2.0
"""Dense inside the node, sparse between nodes: `attach(..., local_group="node")`.

The ranks of a node reduce-scatter the gradient among them, each exchanges its slice of it with the
ranks that have the same slice on other nodes, and the averages are gathered inside the node. So a
node sends what one rank would, and each of its ranks a part of that. To the engine a slice is what
a shard of an FSDP model is.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.ddp_driver import DDPParameterLayout, DriverOptions, StepDriver
from oktopk.adapters.driver import OnStep, clip_
from oktopk.adapters.link import Axes, connect_axes
from oktopk.adapters.parameters import Policy
from oktopk.adapters.thread import ReadyBucket
from oktopk.comm.communicator import Comm, equal_shares
from oktopk.comm.consistency import check_replicas
from oktopk.exchange.layout import Bucket, Layout, Range, shard_group
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.settings import Settings
from oktopk.sparse import acc_dtype
from oktopk.utils.arguments import short_repr

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Where Linux has a number that no other machine has: containers may share a host name."""


class SliceLayout(DDPParameterLayout):
    """All parameters in one flat vector, of which this rank of its node has an equal slice."""

    def __init__(
        self, model: DistributedDataParallel, policy: Policy, rank: int, size: int
    ) -> None:
        super().__init__(model, policy)
        self.names = list(self.parameters)
        self.total = sum(self.numel(name) for name in self.names)
        share = -(-self.total // size)
        self.start, self.stop = rank * share, (rank + 1) * share

    def bucket(self, names: list[str]) -> Bucket:
        """This rank's slice, with the parts of parameters in it that travel dense."""
        ranges = (self._inside(each) for each in super().bucket(names).dense)
        return Bucket(self.stop - self.start, tuple(each for each in ranges if each[0] < each[1]))

    def views(self, flat: Tensor, names: list[str]) -> dict[str, Tensor]:
        """The parts of a slice by parameter, flat; of some parameters it has only a part."""
        found, start = {}, 0
        for name in names:
            begin, end = self._inside((start, start + self.numel(name)))
            if begin < end:
                found[name] = flat[begin:end]
            start += self.numel(name)
        return found

    def whole(self, residual: Tensor | None) -> dict[str, Tensor]:
        """A copy of a slice in the shapes of the parameters, zero outside of the slice."""
        like = next(iter(self.parameters.values()))
        dtype = acc_dtype(like) if residual is None else residual.dtype
        flat = torch.zeros(self.total, dtype=dtype, device=self.device)
        if residual is not None:
            mine = flat[self.start : self.stop]
            mine.copy_(residual[: len(mine)])
        parts = self.parts(flat, self.names).items()
        return {name: part.view(self.parameters[name].shape) for name, part in parts}

    @property
    def num_sparse(self) -> int:
        """Entries of the slice that travel sparse, without padding."""
        real = max(min(self.stop, self.total) - self.start, 0)
        return real - self.bucket(self.names).num_dense

    def _inside(self, each: Range) -> Range:
        """What a range of the whole vector is within the slice."""
        return max(each[0], self.start) - self.start, min(each[1], self.stop) - self.start


class HierarchicalDriver(StepDriver):
    """The steps of a DDP model on this rank, where it has one slice of the gradient of its node."""

    parameters: SliceLayout

    def __init__(
        self,
        settings: Settings,
        axes: Axes,
        parameters: SliceLayout,
        scaling: ResidualScaling,
        options: DriverOptions,
        on_step: OnStep | None,
    ) -> None:
        shards = shard_group(axes.shards, parameters.num_sparse, parameters.device)
        super().__init__(
            settings, axes.replicas, parameters, scaling, options, on_step, shards=shards
        )
        self.node, self._everyone = axes.shards, axes.everyone
        self._slice = torch.empty(0)
        super().set_layout([parameters.names], {})

    def set_layout(self, layout: Layout, residuals: dict[str, Tensor]) -> None:
        """Take over residuals in the shapes of the parameters. A collective inside the node.

        They may lie outside of this rank's slice, if they were saved with other nodes: their sum
        over the node is divided among its ranks.
        """
        whole = self.parameters.whole(None) | residuals
        flat = torch.cat([whole[name].reshape(-1) for name in self.parameters.names])
        shares = equal_shares(flat.to(self.parameters.device), self.node.size)
        super().set_layout([self.parameters.names], {})
        self.engine.residual = self.node.reduce_scatter(shares, stage="state")

    def copied_residuals(self) -> dict[str, Tensor]:
        """A copy of the residual in the shapes of the parameters, zero outside of the slice."""
        return self.parameters.whole(self.engine.residual)

    def _take_all(self) -> None:
        """Reduce-scatter the gradient inside the node and begin the step with this rank's slice."""
        if self.joined:
            raise ValueError("join does not work with local_group: give all ranks equal batches")
        self.parameters.check_sizes(self._waiting, self.parameters.layout_of(self._waiting))
        (whole,) = self.parameters.copies(self._waiting, [self.parameters.names])
        if self.options.clip_before is not None:
            clip_([whole], self.options.clip_before * self.scaling.loss_scale)
        whole /= self.node.size  # before the sum, as DDP does: one of 16 bits may overflow
        shares = equal_shares(whole, self.node.size)
        self._slice = self.node.reduce_scatter(shares, stage="reduce")
        if not self.is_checked:
            self.check_consistency(self._slice, check_every=self.check_every)
        self._step = self.begin(self._slice)
        self._step.add_bucket(0, self._slice)

    def _finish(self, last: ReadyBucket) -> None:
        """End the step, and gather the averages of all slices."""
        assert self._step is not None
        stats = self.engine.finish(self._step, waited_since=last.at)
        self._step = None
        whole = self.node.all_gather(self._slice, stage="gather").view(-1)[: self.parameters.total]
        self.parameters.copy_back([whole], self._waiting, [self.parameters.names])
        self.report(stats)

    def _check_replicas(self, step: int) -> None:
        check_replicas(self.parameters.parameters, self._everyone, step)


def connect_nodes(local_group: Any, timeout: float, undo: ExitStack, device: torch.device) -> Axes:
    """The two axes: inside this rank's node, and across nodes."""
    return connect_axes(_node_key(local_group), None, timeout, undo, device)


def _node_key(local_group: Any) -> int:
    """A number that is the same on all ranks of a node."""
    if isinstance(local_group, str):
        boot = BOOT_ID.read_text() if BOOT_ID.exists() else ""
        name = f"{socket.gethostname()} {boot}"
        return int.from_bytes(sha256(name.encode()).digest()[:7])
    return min(dist.get_process_group_ranks(local_group))


def check_hierarchy(
    local_group: Any, model: DistributedDataParallel, comm: Comm | None, method: str
) -> None:
    """Raise for what `local_group` cannot be, and for what does not work with it."""
    is_node = isinstance(local_group, str) and local_group == "node"
    if not is_node and not isinstance(local_group, dist.ProcessGroup):
        raise TypeError(
            "local_group must be 'node', or the process group of the ranks of this node, got "
            f"{short_repr(local_group)}"
        )
    if dist.get_world_size(model.process_group) != dist.get_world_size():
        raise ValueError("local_group needs a DDP model of all ranks of the job")
    if comm is not None:
        raise ValueError("pass local_group or comm, not both")
    if method == "auto":
        raise ValueError("method='auto' does not work with local_group: name a method")
    if model.find_unused_parameters:
        raise ValueError(
            "find_unused_parameters=True does not work with local_group: pass False to "
            "DistributedDataParallel (with Hugging Face's Trainer, TrainingArguments("
            "ddp_find_unused_parameters=False))"
        )
