# SPDX-License-Identifier: Apache-2.0
"""Baselines that train alone for some steps: DiLoCo, post-local SGD, SparseLoCo."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from oktopk.comm.communicator import Comm, broadcast_
from oktopk.comm.torch_transport import TorchTransport
from oktopk.lab.baselines import BASELINE_NAMES
from oktopk.lab.baselines.base import (
    HOOKS,
    BackwardWait,
    Baseline,
    BaselineOptions,
    HookBaseline,
    dense_bytes,
)

# DiLoCo (Douillard et al., 2023): many local steps, then an outer step on the weight changes.
#
# Every rank trains alone with its own optimizer. Every H steps the ranks average the changes of
# their weights since the last exchange; an outer optimizer, SGD with Nesterov momentum, takes the
# average for a gradient, and all ranks continue from the weights it makes. The state of the inner
# optimizer stays where it is.


class DiLoCo(Baseline):
    """The bare model; the exchange happens in `optimizer.step()`, every few steps."""

    outer_lr, outer_momentum = 0.7, 0.9  # as in the paper

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: BaselineOptions) -> None:
        super().__init__(model, options)
        self.module, self.optimizer = model, optimizer
        self._comm = Comm(TorchTransport())
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._start_alike()
        self._anchors = [nn.Parameter(p.detach().clone()) for p in self._parameters]
        momentum = self.outer_momentum
        self._outer = SGD(self._anchors, lr=self.outer_lr, momentum=momentum, nesterov=momentum > 0)
        self._local_steps = 0
        self._seconds = 0.0
        optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _start_alike(self) -> None:
        """Give every rank the weights and buffers of rank 0, as DDP does."""
        broadcast_([*self.module.parameters(), *self.module.buffers()], self._comm, stage="start")

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        self._local_steps += 1
        self._seconds = 0.0
        if self._local_steps % self.options.every:
            return
        started = time.perf_counter()
        changes = [a - p for a, p in zip(self._anchors, self._parameters, strict=True)]
        mean = self._mean(torch.cat([change.flatten() for change in changes]))
        parts = mean.split([change.numel() for change in changes])
        for anchor, part in zip(self._anchors, parts, strict=True):
            anchor.grad = part.view_as(anchor)
        self._outer.step()
        for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
            parameter.copy_(anchor)
        self._seconds = time.perf_counter() - started

    def _mean(self, flat: Tensor) -> Tensor:
        """The mean of the weight changes of all ranks, with the same bits on every rank."""
        return self._comm.all_reduce_(flat, stage="outer") / self._comm.size

    def bytes_sent(self, step: int) -> int:
        """All weight changes every few steps."""
        if (step + 1) % self.options.every:
            return 0
        return dense_bytes(4)(self.shapes, self.options.world_size)

    @property
    def weights_agree(self) -> bool:
        return self._local_steps % self.options.every == 0

    @property
    def settings(self) -> dict[str, Any]:
        outer = {"outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum}
        return {"every": self.options.every} | outer

    @property
    def waits(self) -> dict[str, float]:
        return {"optimizer": self._seconds}


# Post-local SGD (Lin et al., 2018), as PyTorch's documentation shows it.
#
# Gradients are averaged over all ranks in the first steps. After that every rank steps alone, and
# the weights are averaged every few steps.


class TimedAverager(PeriodicModelAverager):
    """PyTorch's averager, with the seconds of its last call."""

    def __init__(self, period: int, warmup_steps: int) -> None:
        super().__init__(period=period, warmup_steps=warmup_steps)
        self.seconds = 0.0

    def average_parameters(self, params: Iterable[Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        started = time.perf_counter()
        super().average_parameters(params)
        self.seconds = time.perf_counter() - started


class PostLocalSgd(Baseline):
    """DDP with the post-local SGD hook; every rank is a group of its own after the warm-up."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: BaselineOptions) -> None:
        super().__init__(model, options)
        self.module = DistributedDataParallel(model, **options.ddp_arguments)
        alone, _ = dist.new_subgroups(group_size=1)
        state = PostLocalSGDState(
            process_group=None, subgroup=alone, start_localSGD_iter=options.warmup_steps
        )
        self.module.register_comm_hook(state, post_localSGD_hook)
        self._averager = TimedAverager(options.every, options.warmup_steps)
        with warnings.catch_warnings():  # torch.distributed.optim uses what torch has deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import PostLocalSGDOptimizer
        self.optimizer = PostLocalSGDOptimizer(optim=optimizer, averager=self._averager)
        self._wait = BackwardWait(model)

    def after_backward(self) -> None:
        self._wait.measure()

    def bytes_sent(self, step: int) -> int:
        """All gradients in the warm-up, then all weights every few steps."""
        options = self.options
        local_step = step - options.warmup_steps
        if local_step >= 0 and local_step % options.every:
            return 0
        return dense_bytes(4)(self.shapes, options.world_size)

    @property
    def weights_agree(self) -> bool:
        local_step = self.step - 1 - self.options.warmup_steps
        return local_step < 0 or local_step % self.options.every == 0

    @property
    def settings(self) -> dict[str, Any]:
        return {"every": self.options.every, "warmup_steps": self.options.warmup_steps}

    @property
    def waits(self) -> dict[str, float]:
        return {"backward": self._wait.seconds, "optimizer": self._averager.seconds}


# SparseLoCo (Sarfi et al., 2025): DiLoCo whose weight changes are sparse, with 2 bits for a value.
#
# Every rank adds the change of its weights to an error-feedback buffer that decays, and sends the
# largest entries of every chunk of it to all other ranks: an all-gather, whose bytes grow with the
# number of ranks. The buffer takes the place of DiLoCo's outer momentum: the outer step is the
# plain mean. As in the authors' code, an entry is averaged over the ranks that sent it.


CHUNK = 4096  # entries among which the largest are sent: an index has 12 bits
INDEX_BITS, VALUE_BITS = 12, 2
NUM_LEVELS = 2**VALUE_BITS
DECAY = 0.95  # of the error-feedback buffer, as in the paper
SIGMAS = 1.5  # a bin of the 4 is so many standard deviations wide: 6 in all, as in the code


class Selected(NamedTuple):
    """Entries of one tensor, as they are sent."""

    indices: Tensor
    """Positions in the tensor."""

    levels: Tensor
    """Of each entry, the number of its level."""

    table: Tensor
    """The value of each level."""

    @property
    def values(self) -> Tensor:
        return self.table[self.levels]


class SparseLoCo(DiLoCo):
    """DiLoCo with another mean: of the largest entries of each chunk, gathered from all ranks."""

    outer_lr, outer_momentum = 1.0, 0.0

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: BaselineOptions) -> None:
        super().__init__(model, optimizer, options)
        self._sizes = [p.numel() for p in self._parameters]
        self._residual = torch.zeros(sum(self._sizes), device=self._parameters[0].device)

    def _mean(self, flat: Tensor) -> Tensor:
        self._residual.mul_(DECAY).add_(flat)
        words, sent = self._encode()
        self._residual.sub_(sent)
        received = self._comm.exchange(
            dict.fromkeys(self._comm.peers, words),
            dict.fromkeys(self._comm.peers, words.numel()),
            words.device,
            stage="outer",
        )
        messages = received | {self._comm.rank: words}
        total, senders = torch.zeros_like(flat), torch.zeros_like(flat)
        for rank in range(self._comm.size):  # in this order on every rank: the same bits
            self._add(rank, messages[rank], total, senders)
        return total / senders.clamp(min=1)

    def _encode(self) -> tuple[Tensor, Tensor]:
        """The message of this rank, and what the others will read in it as a dense vector."""
        words, parts = [], []
        for part in self._residual.split(self._sizes):
            chosen = select(part, self.options.density)
            words.append(write(chosen))
            parts.append(torch.zeros_like(part).index_copy_(0, chosen.indices, chosen.values))
        return torch.cat(words), torch.cat(parts)

    def _add(self, rank: int, words: Tensor, total: Tensor, senders: Tensor) -> None:
        density, start = self.options.density, 0
        lengths = [num_words(size, density) for size in self._sizes]
        for size, own in zip(self._sizes, words.split(lengths), strict=True):
            chosen = read(own, size, density)
            self._comm.expect(bool((chosen.indices < size).all()), rank)
            places = chosen.indices + start
            total[places] += chosen.values
            senders[places] += 1
            start += size

    def bytes_sent(self, step: int) -> int:
        """The largest entries of every chunk, to every other rank, every few steps."""
        if (step + 1) % self.options.every:
            return 0
        own = sum(num_words(size, self.options.density) for size in self._sizes)
        return 4 * own * (self.options.world_size - 1)

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"density": self.options.density, "decay": DECAY}


def select(x: Tensor, density: float) -> Selected:
    """The largest entries of every chunk, as levels: each stands for the mean of its bin."""
    found = [
        chunks.abs().topk(k, sorted=False).indices + first
        for first, chunks, k in _chunks(x, density)
    ]
    indices = torch.cat([places.flatten() for places in found])
    values = x[indices]
    wide = SIGMAS * values.square().mean().sqrt()
    bins = torch.stack([-wide, torch.zeros_like(wide), wide])
    levels = torch.bucketize(values, bins)
    sums, counts = torch.zeros(NUM_LEVELS, device=x.device), torch.zeros_like(bins.new_empty(4))
    sums.index_add_(0, levels, values)
    counts.index_add_(0, levels, torch.ones_like(values))
    return Selected(indices, levels, sums / counts.clamp(min=1))


def num_words(numel: int, density: float) -> int:
    """Words of the message of one tensor: its table, then 14 bits for each entry."""
    return NUM_LEVELS + -(-_num_entries(numel, density) * (INDEX_BITS + VALUE_BITS) // 32)


def _chunks(x: Tensor, density: float) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Where each chunk begins, the chunks as rows, and how many entries of each are kept."""
    whole = x.numel() // CHUNK * CHUNK
    for start, rows in ((0, x[:whole].view(-1, CHUNK)), (whole, x[whole:].view(1, -1))):
        if rows.numel():
            firsts = start + CHUNK * torch.arange(len(rows), device=x.device).unsqueeze(1)
            yield firsts, rows, _kept(rows.shape[1], density)


def _kept(length: int, density: float) -> int:
    return max(1, round(density * length))


def _num_entries(numel: int, density: float) -> int:
    whole, rest = divmod(numel, CHUNK)
    return whole * _kept(CHUNK, density) + (_kept(rest, density) if rest else 0)


def write(chosen: Selected) -> Tensor:
    """Pack the entries of a tensor into words; every chunk has as many as `_kept` says."""
    codes = (chosen.indices % CHUNK) << VALUE_BITS | chosen.levels
    width = INDEX_BITS + VALUE_BITS
    shifts = np.arange(width)
    bits = (codes.cpu().numpy()[:, None] >> shifts & 1).astype(np.uint8)
    packed = np.packbits(bits, bitorder="little")
    padded = np.pad(packed, (0, -len(packed) % 4)).view(np.int32)
    entries = torch.from_numpy(padded).to(chosen.table.device)
    return torch.cat([chosen.table.view(torch.int32), entries])


def read(words: Tensor, numel: int, density: float) -> Selected:
    """Unpack what `write` wrote for a tensor of `numel` entries."""
    num, width = _num_entries(numel, density), INDEX_BITS + VALUE_BITS
    table, packed = words[:NUM_LEVELS], words[NUM_LEVELS:].cpu().numpy().view(np.uint8)
    bits = np.unpackbits(packed, bitorder="little")[: num * width].reshape(num, width)
    codes = torch.from_numpy(bits.astype(np.int64) @ (1 << np.arange(width))).to(words.device)
    levels, within = codes & (NUM_LEVELS - 1), codes >> VALUE_BITS
    chunk = torch.arange(num, device=words.device) // _kept(CHUNK, density)
    return Selected(within + CHUNK * chunk, levels, table.clone().view(torch.float32))


# `BASELINES`: every baseline by name, and how it is attached.


Build = Callable[[nn.Module, Optimizer, BaselineOptions], Baseline]

BASELINES: dict[str, Build] = {
    **{name: partial(HookBaseline, hook=hook) for name, hook in HOOKS.items()},
    "post_local_sgd": PostLocalSgd,
    "diloco": DiLoCo,
    "sparseloco": SparseLoCo,
}
assert tuple(BASELINES) == BASELINE_NAMES
