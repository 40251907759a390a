# SPDX-License-Identifier: Apache-2.0
"""The door to the network: what comes out is what went in, and the ledger has the right bill."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from laws import WAYS, oktopk_headers, trajectory
from oktopk import Reducer, simulate
from oktopk.comm.communicator import Comm, Traffic, dense_allreduce
from oktopk.comm.torch_transport import TorchTransport
from streams import STREAMS
from worlds import SIZES

EIGHT = partial(pytest.param, 8, marks=pytest.mark.slow)
over_methods = pytest.mark.parametrize("method", WAYS)
OKTOPK = [way for way in WAYS if WAYS[way]["method"] == "oktopk"]


def words(rank: int, num: int) -> torch.Tensor:
    return torch.full((num,), rank, dtype=torch.int32)


def use_every_collective(where) -> dict:
    """Call them all; a rank's words are its number, so that the origin can be seen."""
    comm = where if isinstance(where, Comm) else Comm(TorchTransport(where))
    rank, size, cpu = comm.rank, comm.size, torch.device("cpu")
    counts = [peer % 3 for peer in range(size)]  # some ranks have nothing
    peers = [peer for peer in range(size) if peer != rank]
    heard = comm.exchange(
        {peer: words(rank, counts[rank]) for peer in peers},
        {peer: counts[peer] for peer in peers},
        cpu,
        stage="c",
    )
    after, before = (rank + 1) % size, (rank - 1) % size
    return {
        "all_to_all_sizes": comm.all_to_all_sizes(
            [10 * rank + p for p in range(size)], cpu, stage="a"
        ),
        "all_gather_header": comm.all_gather_header(torch.tensor([rank, 7]), stage="b").tolist(),
        "all_gather_size": comm.all_gather_size(rank, cpu, stage="b"),
        "exchange": {peer: message.tolist() for peer, message in heard.items()},
        "all_reduce_header": comm.all_reduce_header(torch.arange(5) + rank, stage="d").tolist(),
        "all_reduce_of_nothing": comm.all_reduce_header(torch.arange(0), stage="d").tolist(),
        "send_recv_sizes": comm.send_recv_sizes([rank], after, before, cpu, stage="e")
        if size > 1
        else [0],
        "all_reduce": comm.all_reduce_(torch.full((5,), float(rank)), stage="f").tolist(),
        "ledger": comm.ledger.stages,
    }


def expected(rank: int, size: int) -> dict:
    counts = [peer % 3 for peer in range(size)]
    return {
        "all_to_all_sizes": [10 * peer + rank for peer in range(size)],
        "all_gather_header": [[p, 7] for p in range(size)],
        "all_gather_size": list(range(size)),
        "exchange": {p: [p] * counts[p] for p in range(size) if p != rank},
        "all_reduce_header": [size * i + size * (size - 1) // 2 for i in range(5)],
        "all_reduce_of_nothing": [],
        "send_recv_sizes": [(rank - 1) % size],
        "all_reduce": [size * (size - 1) / 2] * 5,
        "ledger": expected_ledger(rank, size),
    }


def expected_ledger(rank: int, size: int) -> dict:
    """The documented bill of each collective, by hand."""
    peers, counts = size - 1, [peer % 3 for peer in range(size)]
    share = -(-5 // size)
    headers = Traffic(0, 4 * peers, peers, 0, 4 * peers, peers)
    return {
        "a": headers,
        "b": headers + Traffic(0, 16 * peers, peers, 0, 16 * peers, peers),
        "c": Traffic(
            counts[rank] * 4 * peers, 0, bool(counts[rank]) * peers,
            (sum(counts) - counts[rank]) * 4, 0,
            sum(1 for p in range(size) if counts[p] and p != rank),
        ),
        "d": Traffic(0, 2 * share * 8 * peers, 2 * peers, 0, 2 * share * 8 * peers, 2 * peers),
        **({"e": Traffic(0, 4, 1, 0, 4, 1)} if size > 1 else {}),
        "f": dense_allreduce(20, size),
    }  # fmt: skip


@pytest.mark.parametrize("P", SIZES)
def test_collectives_over_a_process_group(world, P):
    for rank, got in enumerate(world.run(P, use_every_collective)):
        assert got == expected(rank, P)


@pytest.mark.parametrize("P", [1, 2, 3, 7])
def test_collectives_over_simulated_ranks(P):
    for rank, got in enumerate(simulate(P, use_every_collective)):
        assert got == expected(rank, P)


def handed_and_booked(group, method: str, steps: int, wire: str) -> list[tuple]:
    """Bytes and messages given to the process group, and what the ledger says of them."""
    handed = Traffic()
    send, recv, all_reduce = dist.ProcessGroup.send, dist.ProcessGroup.recv, dist.all_reduce
    before = {name: vars(dist.ProcessGroup)[name] for name in ("send", "recv")}  # as methods

    def count_send(pg, tensors, *where):
        nonlocal handed
        handed += Traffic(payload_sent=tensors[0].nbytes, messages_sent=1)
        return send(pg, tensors, *where)

    def count_recv(pg, tensors, *where):
        nonlocal handed
        handed += Traffic(payload_received=tensors[0].nbytes, messages_received=1)
        return recv(pg, tensors, *where)

    def count_all_reduce(x, **more):
        nonlocal handed
        peers = dist.get_world_size(group) - 1
        share = 2 * x.nbytes * peers // (peers + 1)
        handed += Traffic(share, 0, 2 * peers, share, 0, 2 * peers)
        return all_reduce(x, **more)

    dist.ProcessGroup.send, dist.ProcessGroup.recv = count_send, count_recv
    dist.all_reduce = count_all_reduce
    try:
        settings = {"density": 0.02, "warmup_steps": 1, "wire": wire}
        reducer = Reducer(3000, group=group, **WAYS[method], **settings)
        for step in range(steps):
            reducer.reduce_(STREAMS["heavy"](3000, reducer.comm.rank, step).float())
    finally:
        for name, whole in before.items():
            setattr(dist.ProcessGroup, name, whole)
        dist.all_reduce = all_reduce
    return handed, reducer.comm.ledger.total()


@over_methods
@pytest.mark.parametrize(("P", "wire"), [(1, "bf16"), (3, "bf16"), (3, "int2"), EIGHT("bf16")])
def test_ledger_is_what_torch_distributed_was_handed(world, P, wire, method):
    for handed, booked in world.run(P, handed_and_booked, method, 36, wire):
        assert (handed.sent, handed.received) == (booked.sent, booked.received)
        assert handed.messages_sent == booked.messages_sent
        assert handed.messages_received == booked.messages_received


def plain(*args) -> list:
    return trajectory(*args, wire="plain")


@over_methods
@pytest.mark.parametrize("P", [1, 2, 5, EIGHT()])
def test_bill_is_the_formula_of_the_docs(world, P, method):
    """Exact equality with docs/algorithms.md, from counts each step reports (fp32)."""
    n, k = 2000, 40
    ranks = world.run(P, plain, method, n, k / n, "heavy", 34, torch.float32)
    is_short = method == "oktopk" and P <= 3
    children = [sum(1 for s in (1, 2, 4) if r % (2 * s) == 0 and r + s < P) for r in range(P)]
    for step, done in enumerate(zip(*ranks, strict=True)):
        stats = [rank.stats for rank in done]
        for rank, its in enumerate(stats):
            payload = its.bytes_sent - its.bytes_header
            if method == "dense":
                assert (payload, its.bytes_header) == (2 * 4 * n * (P - 1) // P, 0)
            elif method in ("topka", "gaussiank") or is_short:
                assert (payload, its.bytes_header) == (8 * its.local * (P - 1), 4 * (P - 1))
            elif method == "gtopk":
                ups, downs = int(rank > 0), children[rank]
                assert (payload, its.bytes_header) == (8 * k * (ups + downs), 4 * (ups + downs))
            elif method == "topkdsa":
                assert its.bytes_header == 8 * (P - 1)
                if 2 * its.result >= n:  # filled in: the dense region
                    width = (rank + 1) * n // P - rank * n // P
                    assert its.stages["gather"].payload_sent == 4 * width * (P - 1)
            else:
                agreed = "bounds" in its.stages
                headers = oktopk_headers(P, 4, exact=step % 32 == 0, bounds=agreed)
                assert its.bytes_header in headers
                assert payload <= 24 * k * (P - 1) // P
        by_owners = method.startswith("oktopk") and not is_short
        if P > 1 and (by_owners or (method == "topkdsa" and 2 * stats[0].result < n)):
            gathered = sum(s.stages["gather"].payload_sent for s in stats if "gather" in s.stages)
            assert gathered == 8 * stats[0].result * (P - 1)
        # nothing is sent that nobody gets
        assert sum(s.bytes_sent for s in stats) == sum(s.bytes_received for s in stats)


@pytest.mark.parametrize("method", ["topka", "topkdsa", "gtopk", *OKTOPK])
@pytest.mark.parametrize("P", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_sizes_that_do_not_follow_from_counts_are_in_the_headers(P, method):
    """The formula of docs/algorithms.md, with codecs whose index codec is Rice."""
    args = method, 3000, 0.02, "drifting", 34, torch.float32
    counted, told = (
        simulate(P, lambda comm, wire=wire: trajectory(comm, *args, wire=wire))
        for wire in ("bf16", "int2")
    )
    for rank, (ours, theirs) in enumerate(zip(told, counted, strict=True)):
        edges = P - 1
        if method == "gtopk":  # to its parent, and to each child
            edges = (rank > 0) + sum(rank % (2 * s) == 0 and rank + s < P for s in (1, 2, 4))
        for mine, other in zip(ours, theirs, strict=True):
            ahead = {"topka": "counts", "oktopk": "counts", "gtopk": "reduce"}.get(method, "split")
            before = mine.stats.stages[ahead].header_sent
            assert before == 2 * other.stats.stages[ahead].header_sent
            if method in ("topka", "oktopk", "gtopk"):
                assert mine.stats.bytes_header == 8 * edges
            else:
                pieces = mine.stats.stages["sizes"].header_sent
                assert pieces % (4 * edges) == 0 and pieces <= 4 * P * edges
                assert method in OKTOPK or pieces == 4 * edges
