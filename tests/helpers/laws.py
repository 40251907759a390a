# SPDX-License-Identifier: Apache-2.0
"""The laws as functions over what the ranks did, for real and simulated ranks alike."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk import METHODS, Policy, Reducer, Settings, StepStats, local_steps, simulate
from oktopk.comm.communicator import Comm
from oktopk.comm.torch_transport import TorchTransport
from oktopk.exchange.engine import Engine
from oktopk.exchange.layout import Bucket
from oktopk.methods.base import SparseSum, codec_for
from oktopk.sparse import Sparse
from oktopk.wire import CodecName, EntryRange, encode
from streams import STREAMS

WAYS = {name: {"method": name} for name in METHODS}
WAYS["oktopk, long path"] = {"method": "oktopk", "short_bytes": 0}
"""What the laws hold for, by name: all methods, and `oktopk` where no exchange is a short one."""


@dataclass
class Step:
    """One rank's step. `total` is the result as the sum over ranks, rebuilt from the average.

    Averaged over senders it is the average.
    """

    acc: Tensor
    total: Tensor
    residual: Tensor
    stats: StepStats
    settings: Settings
    sent: Sparse | None
    """What this rank sent; None in a dense step."""

    dense: tuple[tuple[int, int], ...] = ()
    """Ranges that travel dense beside the entries."""


def record_sent(engine: Engine) -> list[Sparse | None]:
    """A list that gets what this rank sends in every step from now on."""
    seen, finish = [], engine.finish

    def recorded(step, *args, **more):
        sums = step.recorder.sums[0]
        seen.append(deepcopy(sums.sent) if isinstance(sums, SparseSum) else None)
        return finish(step, *args, **more)

    engine.finish = recorded
    return seen


def trajectory(
    where, method: str, n: int, density: float, stream: str, steps: int, dtype=torch.float64,
    dense: tuple[tuple[int, int], ...] = (), **more,
) -> list[Step]:  # fmt: skip
    """Run a reducer over a stream on one rank; `where` is a process group or a `Comm`."""
    place = {"comm": where} if isinstance(where, Comm) else {"group": where}
    reducer = Reducer(n, density=density, **WAYS[method], **place, **more)
    rank, size = reducer.comm.rank, reducer.comm.size
    if dense:  # as adapters have it for biases and norms
        reducer._engine.set_buckets([Bucket(n, dense)])
    done, sent = [], record_sent(reducer._engine)
    for step in range(steps):
        grad = STREAMS[stream](n, rank, step).to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        decay = reducer.settings.decay
        acc = grad.to(wide) + reducer.residual.to(wide) * decay
        stats = reducer.reduce_(grad)
        residual = reducer.residual.to(torch.float64, copy=True)
        over_all = reducer.settings.average == "all" or stats.phase == "dense"
        times = size if over_all else 1
        total = grad.double() * times
        of = stats, reducer.settings, sent[-1], dense
        done.append(Step(acc.double(), total, residual, *of))
    return done


def local_steps_trajectory(
    where,
    method: str,
    n: int,
    density: float,
    stream: str,
    rounds: int,
    dtype=torch.float64,
    **more,
) -> list[Step]:
    """The same over rounds of local steps: SGD with the stream as gradient, so `acc` is known."""
    comm = where if isinstance(where, Comm) else Comm(TorchTransport(where))
    every, seen = more.pop("every", 2), []
    weights = torch.nn.Parameter(torch.zeros(n, 1, dtype=dtype))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    model = torch.nn.ParameterList([weights])
    arguments = {"average": "all", "decay": 1.0, "policy": Policy(vectors=False, below=0)} | more
    how = {"method": method, "density": density, "every": every, "on_step": seen.append}
    handle = local_steps(model, optimizer, comm=comm, **how, **arguments)
    over_all = handle.settings.average == "all" or method == "dense"
    done, sent = [], record_sent(handle.driver.engine)
    for number in range(rounds):
        before = weights.detach().to(torch.float64, copy=True).view(-1)
        residual = handle.residuals.get("0", torch.zeros(n, dtype=dtype)).double().view(-1)
        acc = residual * handle.settings.decay
        for step in range(every):
            grad = STREAMS[stream](n, comm.rank, number * every + step)
            weights.grad = grad.to(dtype).view(n, 1)
            now = (weights.detach() - weights.grad).double().view(-1)
            optimizer.step()
        assert len(seen) == number + 1
        after = weights.detach().to(torch.float64, copy=True).view(-1)
        mean = before - after
        residual = handle.residuals.get("0", torch.zeros(n, dtype=dtype))
        residual = residual.to(torch.float64, copy=True).view(-1)
        times = comm.size if over_all else 1
        acc += before - now
        done.append(Step(acc, mean * times, residual, seen[-1], handle.settings, sent[-1]))
    handle.close()
    return done


def simulated(size: int, *args, **more) -> list[list[Step]]:
    """The trajectories of `size` simulated ranks."""
    return simulate(size, lambda comm: trajectory(comm, *args, **more))


def num_senders(done: tuple[Step, ...]) -> Tensor:
    """By entry, how many ranks sent it: counted from what each of them sent, not from residuals."""
    sent = [rank.sent for rank in done]
    num = torch.zeros(sent[0].numel, dtype=torch.float64)
    if done[0].settings.method == "gtopk":
        num_dense = sum(end - start for start, end in done[0].dense)
        num = num_merged(sent, done[0].stats.k - num_dense, done[0].settings.wire)
    else:
        for each in sent:
            num[each.indices.long()] += 1
    for start, end in done[0].dense:
        num[start:end] = len(done)
    return num


def num_merged(sent: list[Sparse], k: int, wire: CodecName) -> Tensor:
    """The same for the tree of `gtopk`, in which an entry may be cut on one branch and survive on
    another: merged here as the paper says, in dense vectors."""
    sums = [each.to_dense() for each in sent]
    nums = [Sparse(each.indices, torch.ones_like(each.values), each.numel) for each in sent]
    nums, numel, stride = [each.to_dense() for each in nums], sent[0].numel, 1
    while stride < len(sent):
        for parent in range(0, len(sent) - stride, 2 * stride):
            child = parent + stride
            (indices,) = nums[child].nonzero(as_tuple=True)
            values, entries = sums[child][indices], EntryRange(len(indices), 0, numel)
            codec = codec_for(values, wire)
            sums[child][indices] = encode(indices.int(), values, entries, codec).values
            sums[parent] += sums[child]
            nums[parent] += nums[child]
            (indices,) = nums[parent].nonzero(as_tuple=True)
            by_size = sums[parent][indices].abs().argsort(descending=True, stable=True)
            cut = indices[by_size[k:]]
            sums[parent][cut] = nums[parent][cut] = 0
        stride *= 2
    return nums[0].double()


def assert_nothing_is_lost(ranks: list[list[Step]], tolerance: float) -> None:
    """Sum of acc = result + sum of residuals; tolerance 0 asks for the very bits.

    Averaged over senders, the result counts as many times as it had senders.
    """
    for step, done in enumerate(zip(*ranks, strict=True)):
        had = sum(rank.acc for rank in done)
        by_senders = done[0].settings.average == "senders" and done[0].sent is not None
        total = done[0].total * num_senders(done) if by_senders else done[0].total
        total = total if tolerance else total.round()
        have = total + sum(rank.residual for rank in done)
        scale = max(1.0, *(float(rank.acc.abs().max()) if len(rank.acc) else 0.0 for rank in done))
        worst = float((had - have).abs().max()) if len(had) else 0.0
        assert worst <= tolerance * scale, f"step {step}: {worst} lost"


def assert_all_agree(ranks: list[list[Step]]) -> None:
    for step, done in enumerate(zip(*ranks, strict=True)):
        for rank, other in enumerate(done[1:], 1):
            assert torch.equal(done[0].total, other.total), f"step {step}: rank {rank} differs"


def assert_k_means_k(ranks: list[list[Step]], method: str, after: int = 3) -> None:
    """|local| within 10 % of k and never over it; |result| too where the method keeps k."""
    for done in ranks:
        for step in done[after:]:
            stats = step.stats
            assert 0.9 * stats.k <= stats.local <= stats.k, stats
            if METHODS[WAYS[method]["method"]].keeps_k:
                assert 0.9 * stats.k <= stats.result <= 1.1 * stats.k, stats


def oktopk_headers(size: int, value_bytes: int, *, exact: bool, bounds: bool) -> set[int]:
    """Header bytes `oktopk` may send per rank in a step: the formula of docs/algorithms.md.

    A step that is not due for exact thresholds may find that it needs them, and one more search may
    follow to stay within the bound on words.
    """
    peers = size - 1
    sizes = 4 * peers
    ladder = 0 if exact else 4 * 13 * peers
    search = 4 * 3 * peers + value_bytes * 2 * 4 * -(-256 // size) * peers
    agreement = 2 * 8 * peers if bounds else 0
    fewest = 1 if exact else 0
    return {sizes + ladder + agreement + num * search for num in range(fewest, 3)}


def assert_bill_is_bounded(
    ranks: list[list[Step]], value_bytes: int = 8, is_sized_by_count: bool = True
) -> None:
    """`oktopk`: at most 6k(P-1)/P words of payload (k up to a multiple of P), bounded headers.

    That holds for the short path and for the long one.
    """
    size = len(ranks)
    most = max(oktopk_headers(size, value_bytes, exact=False, bounds=True))
    if not is_sized_by_count:  # a size for each message of the split and for each piece gathered
        most += 4 * (1 + size) * (size - 1)
    for done in ranks:
        for step in done:
            stats = step.stats
            k = stats.k if stats.k >= 2 * size else -(-stats.k // size) * size
            entries = 3 * k * (size - 1) // size
            assert stats.bytes_sent - stats.bytes_header <= entries * (4 + value_bytes), stats
            assert stats.bytes_header <= most, stats
