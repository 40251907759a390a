"""What a method is: how it selects entries, how it exchanges them, and what that costs.

A method is one file (or one package) in this folder that defines one `Method`, and one row of
`oktopk.METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oktopk.comm.communicator import Comm
from oktopk.methods.candidates import Candidates
from oktopk.methods.cost_model import Cost, Work
from oktopk.methods.state import MethodState
from oktopk.sparse import Sparse
from oktopk.wire.codec import CodecName


@dataclass(frozen=True, slots=True)
class SparseSum:
    """The result of a sparse exchange, and what this rank must know to update its residual."""

    result: Sparse
    """The sum over ranks, with the same bits on every rank."""

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

    `dense_part` are entries that travel dense beside the selected ones; they are summed too.
    """

    def __call__(
        self,
        local: Sparse,
        dense_part: Tensor,
        k: int,
        state: MethodState,
        codec: CodecName,
        comm: Comm,
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


def codec_for(values: Tensor, codec: CodecName) -> CodecName:
    """float64 gradients travel unrounded: whoever uses them wants every bit."""
    return "plain" if values.dtype == torch.float64 else codec


def imbalance(counts: list[int]) -> float:
    """Largest count over the mean count; 1 when there are none."""
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0
