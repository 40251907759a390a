# SPDX-License-Identifier: Apache-2.0
"""SparseLoCo (Sarfi et al., 2025): DiLoCo whose weight changes are sparse, with 2 bits for a value.

Every rank adds the change of its weights to an error-feedback buffer that decays, and sends the
largest entries of every chunk of it to all other ranks: an all-gather, whose bytes grow with the
number of ranks. The buffer takes the place of DiLoCo's outer momentum: the outer step is the plain
mean. As in the authors' code, an entry is averaged over the ranks that sent it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oktopk.baselines.base import BaselineOptions
from oktopk.baselines.diloco import DiLoCo

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
