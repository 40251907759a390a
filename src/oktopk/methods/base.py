# SPDX-License-Identifier: Apache-2.0
"""What a method is, what it keeps between steps, and what an exchange by it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from oktopk import kernels
from oktopk.comm.communicator import Comm
from oktopk.sparse import EntryBuffer, Sparse, first, placed
from oktopk.wire import CodecName, EntryRange, entry_bits, is_exact, is_possible
from oktopk.wire import size_rounds as codec_size_rounds

# Candidates: entries found in the same pass that adds the gradient to the residual.


@dataclass(slots=True)
class Candidates:
    """Entries that reached a threshold somewhat below the one that k entries should reach.

    A group of buckets arrives bucket by bucket, so `add_bucket` is called once per bucket.
    """

    threshold: float
    capacity: int
    """Entries that are stored at most."""

    buffer: EntryBuffer
    """Indices and values of all buckets so far, one bucket after the other."""

    numel: int = 0
    """Number of elements seen so far."""

    num: int = 0
    """Entries stored."""

    num_reaching: int = 0
    """Entries that reached the threshold, stored or not."""

    def add_bucket(self, residual: Tensor, grad: Tensor, acc: Tensor) -> None:
        """Set `acc = residual + grad` and store the entries of it that reach the threshold."""
        if not kernels.is_synchronous(acc):  # `find_in` will: one launch instead of one per bucket
            torch.add(residual, grad, out=acc)
            return
        parts = kernels.thread_slices(acc)
        if len(parts) == 1:
            self._append(*self._find(residual, grad, acc, self._free))
            return
        found = kernels.run_in_threads(
            lambda part: self._find(residual[part], grad[part], acc[part], None), parts
        )
        for sparse, num_reaching in found:
            # the threads do not know of each other: each may have found as many as fit in all
            fitting = first(sparse, self.capacity - self.num)
            self._append(placed(fitting, self._free, self.numel), num_reaching)

    def find_in(self, acc: Tensor) -> None:
        """Find the candidates in the whole of `acc`, unless `add_bucket` already has."""
        if not kernels.is_synchronous(acc):
            found, self.num_reaching = kernels.select(acc, self.threshold, self.capacity)
            self.buffer = found.indices, found.values
            self.num, self.numel = found.num, found.numel

    @property
    def entries(self) -> Sparse:
        """The stored entries."""
        indices, values = self.buffer
        return Sparse(indices[: self.num], values[: self.num], self.numel)

    @property
    def _free(self) -> EntryBuffer:
        return self.buffer[0][self.num :], self.buffer[1][self.num :]

    def _find(
        self, residual: Tensor, grad: Tensor, acc: Tensor, out: EntryBuffer | None
    ) -> tuple[Sparse, int]:
        offset = 0 if out is None else self.numel
        left = self.capacity - self.num
        return kernels.accumulate_select(residual, grad, acc, self.threshold, left, out, offset)

    def _append(self, found: Sparse, num_reaching: int) -> None:
        self.num, self.numel = self.num + found.num, found.numel
        self.num_reaching += num_reaching


# The cost model: what one exchange of a method takes on a given network and machine.
#
# Time is rounds x latency + bytes / bandwidth + the seconds of the kernels. Bandwidth is what a
# rank sends while all ranks send, so it includes whatever they share: a switch, a core, a memory
# bus.


SHORT_BYTES = 96 * 2**10
"""Bytes that a rank may send in the short exchange of `oktopk` (`Settings.short_bytes`)."""


@dataclass(frozen=True, slots=True)
class Link:
    """A network as its ranks see it."""

    latency: float
    """Seconds of a round of smallest messages between all ranks."""

    bandwidth: float
    """Bytes a rank sends per second while all ranks send."""


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """How fast the kernels are on this machine."""

    per_element: float
    """Seconds to accumulate, select and apply, per element of the gradient."""

    per_entry: float
    """Seconds to encode, decode and add, per entry."""


@dataclass(frozen=True, slots=True)
class Work:
    """A gradient to exchange."""

    numel: int
    kept: int
    size: int
    """World size."""

    wire: CodecName = "bf16"
    dtype: torch.dtype = torch.float32
    """Of sums. Those of float64 travel plain, whatever the codec."""

    num_dense: int = 0
    """Entries that travel dense, beside the `numel`."""

    short_bytes: int = SHORT_BYTES
    """Bytes that a rank may send in a short exchange (`Settings.short_bytes`)."""

    @property
    def codec(self) -> CodecName:
        """How entries travel."""
        return "plain" if self.dtype == torch.float64 else self.wire

    @property
    def size_rounds(self) -> int:
        """Rounds of headers more before a gather of sums: 1 with a codec whose sizes do not follow
        from the counts."""
        return codec_size_rounds(self.codec)

    def sparse_bytes(self, num: float) -> float:
        """Bytes on the wire of so many entries, spread evenly over the gradient."""
        if not num:
            return 0.0
        wide = self.dtype == torch.float64
        return num * (96.0 if wide else entry_bits(self.codec, num / max(self.numel, 1))) / 8

    @property
    def dense_bytes(self) -> int:
        """Bytes of what travels dense, sent once."""
        return self.num_dense * self.dtype.itemsize

    @property
    def union(self) -> float:
        """Expected number of entries that some rank selected, if ranks select independently."""
        if self.kept >= self.numel:
            return self.numel
        return self.numel * -math.expm1(self.size * math.log1p(-self.kept / self.numel))


@dataclass(frozen=True, slots=True)
class Cost:
    """What one exchange costs the rank that has the most to do."""

    rounds: float
    bytes: float
    """Bytes that are sent one after the other, by one rank or along the longest way."""

    sent: float
    """Bytes that a rank sends, the mean of all ranks. Headers are not in it."""

    elements: float
    """Elements of the gradient that the kernels walk over."""

    entries: float
    """Entries that the kernels encode, decode or add."""

    def kernel_seconds(self, speed: KernelSpeed) -> float:
        return self.elements * speed.per_element + self.entries * speed.per_entry

    def seconds(self, link: Link, speed: KernelSpeed) -> float:
        """Predicted seconds, selection and delivery included, with nothing overlapped."""
        network = self.rounds * link.latency + self.bytes / link.bandwidth
        return network + self.kernel_seconds(speed)


# What a method keeps between steps, beside the residual. Only `oktopk` uses it.


MIN_SLOPE, MAX_SLOPE = 0.5, 64.0

Count = Annotated[int, Meta(ge=0, lt=2**62)]
Pair = Annotated[list[float], Meta(min_length=2, max_length=2)]
"""Threshold and slope of an estimate."""


@dataclass(frozen=True, slots=True)
class ThresholdEstimate:
    """A threshold that about k entries reach, and how fast their count falls when it rises.

    Near the threshold the count is modelled as proportional to threshold ** -slope. The slope is
    about 2 for heavy tails, 4 for Laplace and 6 for Gaussian gradients at a density of 2 %.
    """

    threshold: float
    slope: float = 4.0

    def at(self, ratio: float) -> float:
        """The threshold that `ratio * k` entries should reach."""
        return self.threshold * ratio ** (-1 / self.slope)

    def grid(self, num: int, ratio: float) -> list[float]:
        """Ascending thresholds around this one, whose counts should differ by `ratio` each."""
        return [self.at(ratio ** (num / 2 - i)) for i in range(num)]

    def scaled(self, factor: float) -> ThresholdEstimate:
        """The estimate after all entries were multiplied by `factor`."""
        return ThresholdEstimate(self.threshold * factor, self.slope)

    def updated(self, threshold: float, ratio: float) -> ThresholdEstimate:
        """The estimate after `ratio * k` entries were counted to reach `threshold`."""
        return ThresholdEstimate(threshold * ratio ** (1 / self.slope), self.slope)


def slope_between(low: float, count_low: int, high: float, count_high: int) -> float | None:
    """The slope between two thresholds and their counts; None where they do not determine one."""
    if not (0 < low < high and 0 < count_high < count_low):
        return None
    slope = math.log(count_low / count_high) / math.log(high / low)
    return min(max(slope, MIN_SLOPE), MAX_SLOPE)


class SavedThresholds(msgspec.Struct, frozen=True, kw_only=True):
    """A `MethodState` as it is saved."""

    step: Count
    local: Pair | None
    result: Pair | None
    bounds: list[Count] | None
    uneven: bool
    single_owner: bool


@dataclass(slots=True)
class MethodState:
    """Threshold estimates, region bounds and the number of sparse steps."""

    exact_every: int = 32
    """Steps between exact thresholds (tau' of the paper)."""

    bounds_every: int = 64
    """Steps between updates of the region bounds (tau of the paper)."""

    short_bytes: int = SHORT_BYTES
    """Bytes that a rank may send on the short path (`Settings.short_bytes`)."""

    rank: int = 0
    size: int = 1
    """This rank among those that exchange, where it decides which of equal entries it selects."""

    step: int = 0
    """Sparse steps finished."""

    local: ThresholdEstimate | None = None
    """Of this rank's own entries; every rank has another."""

    result: ThresholdEstimate | None = None
    """Of the summed entries, the same on every rank."""

    bounds: list[int] | None = None
    """The P+1 cut points of the regions, the same on every rank."""

    uneven: bool = False
    """Whether the regions of the last step held so different numbers of entries that new bounds
    are due."""

    single_owner: bool = False
    """Whether rank 0 owns the only region, because even regions once forced the result to be cut
    to stay within the bound on words."""

    buffer: EntryBuffer | None = None
    """Memory for candidates, used again in every step. Its content is not part of the state."""

    def ties_from(self, numel: int) -> int:
        """The index at which this rank begins to select among equal magnitudes."""
        return self.rank * numel // self.size

    def shared(self) -> str:
        """What must be the same on every rank, as text to compare."""
        return repr((self.step, self.result, self.bounds, self.uneven, self.single_owner))

    def save(self) -> SavedThresholds:
        """What a resumed run needs."""
        return SavedThresholds(
            step=self.step,
            local=_pair(self.local),
            result=_pair(self.result),
            bounds=None if self.bounds is None else list(self.bounds),
            uneven=self.uneven,
            single_owner=self.single_owner,
        )

    def load(self, saved: SavedThresholds) -> None:
        """Continue from what `save` returned."""
        self.step = saved.step
        self.local = None if saved.local is None else ThresholdEstimate(*saved.local)
        self.result = None if saved.result is None else ThresholdEstimate(*saved.result)
        self.bounds = None if saved.bounds is None else list(saved.bounds)
        self.uneven, self.single_owner = saved.uneven, saved.single_owner


def _pair(estimate: ThresholdEstimate | None) -> list[float] | None:
    return None if estimate is None else [estimate.threshold, estimate.slope]


# What a method is: how it selects entries, how it exchanges them, and what that costs.
#
# A method is one file (or one package) in this folder that defines one `Method`, and one row of
# `oktopk.METHODS`.


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
