# SPDX-License-Identifier: Apache-2.0
"""What a method is: how it selects entries, how it exchanges them, and what that costs.

A method is one file (or one package) in this folder that defines one `Method`, and one row of
`oktopk.METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.methods.candidates import Candidates
from oktopk.methods.cost_model import Cost, Work
from oktopk.methods.state import MethodState
from oktopk.sparse import Sparse
from oktopk.wire.codec import CodecName, EntryRange, is_exact, is_possible

Average = Literal["all", "senders"]
"""Whether a sum is divided by the number of all ranks, or of those that sent the entry."""


@dataclass(frozen=True, slots=True)
class SparseSum:
    """The result of a sparse exchange, and what this rank must know to update its residual."""

    result: Sparse
    """The sum over ranks, with the same bits on every rank. If it is averaged over senders, each
    sum is divided by the number of ranks that sent its entry."""

    sent: Sparse
    """What this rank contributed, as the receivers decoded it: rounded where the codec rounds."""

    dense_part: Tensor
    """The sum of the entries that travel dense, with the same bits on every rank."""

    corrections: tuple[Sparse, ...] = ()
    """What was taken off sums on this rank although their index is in the result, by rounding or
    by a cut. It belongs to this rank's residual."""

    imbalance: float = 1.0
    """Largest share of the result that one rank gathered, over the mean share."""

    num_sent: int = 0
    """Entries this rank sent, counted once per receiver, those that travel dense among them."""

    offset: int = 0
    """Position that the indices count from: where a bucket begins within its group."""


@dataclass(frozen=True, slots=True)
class DenseSum:
    """The result of an all-reduce: every entry is there, so nothing stays in the residual."""

    result: Tensor
    """The sum over ranks, with the same bits on every rank."""


class Select(Protocol):
    """Chooses at most k entries of `acc`. Zeros are never chosen; a NaN or Inf always is if k > 0.

    `candidates` are those that `ProposeCandidates` asked for, found while the gradient was added.
    """

    def __call__(
        self, acc: Tensor, k: int, state: MethodState, candidates: Candidates | None
    ) -> Sparse: ...


class ProposeCandidates(Protocol):
    """Asks for candidates to be found in the pass that adds the gradient; None if it needs none."""

    def __call__(self, acc: Tensor, k: int, state: MethodState) -> Candidates | None: ...


class Exchange(Protocol):
    """Sums what all ranks selected. Every rank must call it, whatever it has selected.

    `dense_part` are entries that travel dense beside the selected ones; they are summed too. With
    `average="senders"` each selected entry is divided by the number of ranks that sent it; what
    travels dense is sent by all ranks and stays a sum.
    """

    def __call__(
        self,
        local: Sparse,
        dense_part: Tensor,
        k: int,
        state: MethodState,
        codec: CodecName,
        comm: Comm,
        average: Average = "all",
    ) -> SparseSum: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One way to average a gradient. `dense` has nothing to select: every step is an all-reduce."""

    name: str
    summary: str
    words: str
    """Words sent per rank and step with fp32 values, headers apart; see docs/algorithms.md."""

    cost: Callable[[Work], Cost]
    """Rounds, bytes and kernel work of one exchange, for predictions."""

    keeps_k: bool = False
    """Whether the result has about k entries too, not only what each rank selects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseMethod(Method):
    """A method that selects entries and exchanges only those."""

    select: Select
    exchange: Exchange
    propose: ProposeCandidates | None = None
    """A method without it must see the whole gradient before it can choose."""


def check_told(
    ranges: Sequence[EntryRange], codec: CodecName, dtype: torch.dtype, comm: Comm
) -> None:
    """Refuse sizes that no message has, before memory is allocated for it. One of each rank."""
    for peer in comm.peers:
        comm.expect(is_possible(ranges[peer], codec, dtype), peer)


def codec_for(values: Tensor, codec: CodecName) -> CodecName:
    """float64 gradients travel unrounded: whoever uses them wants every bit."""
    return "plain" if values.dtype == torch.float64 else codec


def imbalance(counts: list[int]) -> float:
    """Largest count over the mean count; 1 when there are none."""
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0


def count_senders(indices: Tensor, values: Tensor, splits: list[int], lo: int, hi: int) -> Tensor:
    """How many of several selections have each entry of their sum, as `kernels.merge` orders it."""
    return kernels.merge(indices, torch.ones_like(values), splits, lo, hi).values


def divided(sums: Sparse, num_senders: Tensor | None) -> Sparse:
    """The sums over the numbers of their senders; without numbers, the sums as they are."""
    if num_senders is None:
        return sums
    return Sparse(sums.indices, sums.values / num_senders, sums.numel)


def correction(
    sums: Sparse, decoded: Tensor, num_senders: Tensor | None, codec: CodecName
) -> tuple[Sparse, ...]:
    """What was taken off this rank's sums before all ranks decoded them: it stays in the residual.

    `decoded` are the sums as all ranks read them, each divided by the number of its senders. Times
    that number they are what was applied of the sum.
    """
    if num_senders is not None:
        return (Sparse(sums.indices, sums.values - decoded * num_senders, sums.numel),)
    if is_exact(codec):
        return ()
    return (Sparse(sums.indices, sums.values - decoded, sums.numel),)


def at_indices(values: Tensor, sparse: Sparse, kept: Sparse) -> Tensor:
    """The values that belong to the entries of `sparse` that were kept."""
    return values[torch.searchsorted(sparse.indices, kept.indices)]
