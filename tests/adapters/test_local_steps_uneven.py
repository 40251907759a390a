# SPDX-License-Identifier: Apache-2.0
"""Local steps of ranks that take different numbers of steps, or all the same moves."""

from __future__ import annotations

import logging
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk import METHODS, simulate
from rounds import same, same_state, start, take_steps, weights_of
from sites import Net as SiteNet
from sites import Site, mesh_of, one_step, shard, shards_of
from streams import STREAMS

SPARSE_ONLY = oktopk.Policy(vectors=False, below=0)
N = 300
ORDERS = [
    {"every": 4},
    {"every": 1},
    {"every": 4, "delay": 2},
    {"every": 4, "fragments": 2},
    {"every": 4, "fragments": 2, "delay": 3},
    {"every": 6, "fragments": 3, "delay": 1},
]
over_orders = pytest.mark.parametrize("options", ORDERS, ids=str)
over_methods = pytest.mark.parametrize("method", METHODS)


def said(caplog, text: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if text in r.getMessage()]


def rank_of(where) -> int:
    return where.rank if isinstance(where, oktopk.Comm) else dist.get_rank(where)


# The end.


def uneven(where, num_steps: list[int], options: dict) -> tuple:
    """The weights of this rank after it has finished, and how many exchanges there were."""
    rank = rank_of(where)
    net, optimizer, handle = start(where, **options)
    with handle:
        take_steps(net, optimizer, rank, range(num_steps[rank]))
    assert handle.closed
    return weights_of(net), handle.step, handle.driver.anchor


def assert_equal_ends(ranks) -> None:
    for weights, step, anchor in ranks:
        assert same(weights, ranks[0][0]) and step == ranks[0][1]
        assert torch.equal(anchor, ranks[0][2])


@over_orders
@pytest.mark.parametrize("num_steps", [[9, 9, 9], [8, 8, 8], [9, 13, 2], [0, 0, 21], [0, 0, 0]])
def test_all_ranks_end_with_the_same_weights(num_steps, options):
    assert_equal_ends(simulate(3, lambda comm: uneven(comm, num_steps, options)))


def whole_moves(where, num_steps: list[int], options: dict) -> tuple:
    """Moves by whole numbers, of which sums are exact: this rank's total, weights, residual."""
    rank = rank_of(where)
    place = {"comm": where} if isinstance(where, oktopk.Comm) else {"group": where}
    weights = [nn.Parameter(torch.zeros(N, 1, dtype=torch.float64)) for _ in range(3)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    how = {"density": 0.1, "decay": 1.0, "average": "all", "policy": SPARSE_ONLY, "wire": "plain"}
    model, moved = nn.ParameterList(weights), torch.zeros(3, N, dtype=torch.float64)
    handle = oktopk.local_steps(model, optimizer, verbose=False, **(place | how | options))
    for step in range(num_steps[rank]):
        for number, p in enumerate(weights):
            move = STREAMS["whole"](N, rank, 3 * step + number)
            moved[number] += move
            p.grad = -move.clone().view(N, 1)
        optimizer.step()
    handle.finish()
    residuals = list(handle.residuals.values()) or [torch.zeros(N)] * 3  # of dense exchanges
    residual = torch.stack([each.view(-1) for each in residuals])
    handle.close()
    return moved, torch.stack([p.detach().view(-1) for p in weights]), residual


@over_orders
@over_methods
@pytest.mark.parametrize("P", [2, 4])
def test_nothing_is_lost_of_ranks_that_finish_early(P, method, options):
    num_steps = [3, 10, 0, 5][:P]
    rank_main = partial(whole_moves, num_steps=num_steps, options=options | {"method": method})
    ranks = simulate(P, rank_main)
    moved, residual = (sum(rank[i] for rank in ranks) for i in (0, 2))
    assert torch.equal(P * ranks[0][1] - residual, moved)
    assert all(torch.equal(weights, ranks[0][1]) for _, weights, _ in ranks)


@over_methods
def test_real_ranks_end_alike_with_any_number_of_threads(worlds, method):
    """Also where values are rounded: `int4`, a mean over senders, and a residual that decays."""
    options = {"every": 3, "fragments": 2, "delay": 1, "method": method}
    options |= {"wire": "int4", "average": "senders", "decay": 0.95}
    runs = [
        worlds.run(4, whole_moves, [7, 2, 10, 5], options, threads=threads) for threads in (1, 2, 4)
    ]
    for ranks in runs:
        assert all(torch.equal(weights, runs[0][0][1]) for _, weights, _ in ranks)
        for (_, _, residual), (_, _, expected) in zip(ranks, runs[0], strict=True):
            assert torch.equal(residual, expected)


def epochs(where, options: dict, stop: int) -> tuple:
    """Two epochs of uneven length, and a third one; a stop and a resume inside the last."""
    rank = rank_of(where)
    net, optimizer, handle = start(where, **options)
    for epoch in range(2):
        take_steps(net, optimizer, rank, range(10 * epoch, 10 * epoch + 3 + 4 * (rank == epoch)))
        handle.finish()
    take_steps(net, optimizer, rank, range(20, 20 + stop))
    if stop:
        states = optimizer.state_dict(), handle.state_dict()
        handle.close()
        net, optimizer, handle = start(where, seed=1, **options)
        optimizer.load_state_dict(states[0])
        handle.load_state_dict(states[1])
    take_steps(net, optimizer, rank, range(20 + stop, 29))
    handle.exchange()
    state = handle.state_dict()
    handle.close()
    return weights_of(net), state


@over_orders
def test_training_goes_on_after_an_epoch_and_stops_and_resumes(options):
    straight = simulate(3, lambda comm: epochs(comm, options, 0))
    assert all(same(weights, straight[0][0]) for weights, _ in straight)
    for stop in (1, 5):
        stopped = simulate(3, partial(epochs, options=options, stop=stop))
        for one, other in zip(straight, stopped, strict=True):
            assert same(one[0], other[0]) and same_state(one[1], other[1])


def shadow_bytes(comm) -> list[tuple[int, int]]:
    """What a rank that has finished sends in each exchange, and what the ledger has of it."""
    seen = []
    net, optimizer, handle = start(comm, on_step=seen.append, check_every=0, exact_every=1)
    before = comm.ledger.total().sent
    take_steps(net, optimizer, comm.rank, range(1 if comm.rank else 12))
    handle.finish()
    handshake = comm.ledger.stages["handshake"].sent
    sent = sum(stats.bytes_sent for stats in seen)
    assert comm.ledger.total().sent - before - handshake == sent
    handle.close()
    return [stats.step for stats in seen]


def test_exchanges_of_a_rank_that_has_finished_are_counted_as_all_others():
    assert simulate(2, shadow_bytes) == [[0, 1, 2, 3]] * 2


def test_a_nan_at_the_end_takes_all_ranks_back(caplog):
    def rank_main(comm):
        net, optimizer, handle = start(comm, every=4)
        take_steps(net, optimizer, comm.rank, range(4 + 3 * comm.rank))
        before = handle.driver.anchor.clone()
        if comm.rank == 1:
            with torch.no_grad():
                net.head.bias[0] = float("nan")
        with handle:
            pass
        assert handle.skipped_steps == 1 and torch.equal(before, handle.driver.anchor)
        return weights_of(net)

    one, other = simulate(2, rank_main)
    assert same(one, other)


# Sites.


def uneven_sites(group, options: dict) -> tuple:
    mesh, torch_rank = mesh_of(2), dist.get_rank()
    torch.manual_seed(torch_rank // 2)
    model = shard(SiteNet(), mesh=mesh["shard"])
    site = Site(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    across = mesh["replicate"].get_group()
    site.handle = oktopk.local_steps(model, site.optimizer, group=across, every=3, **options)
    with site.handle:
        for step in range(3 if torch_rank < 2 else 8):
            one_step(site, step)
    return shards_of(site.model), site.handle.step


@pytest.mark.parametrize("options", [{}, {"delay": 1, "fragments": 2}], ids=str)
def test_sites_of_fsdp2_may_take_different_numbers_of_steps(worlds, options):
    ranks = worlds.run(4, uneven_sites, options)
    for one, other in zip(ranks[:2], ranks[2:], strict=True):
        assert same(one[0], other[0]) and one[1] == other[1] >= 3


# What goes wrong.


def never_finished(group) -> tuple:
    """Rank 1 only closes its handle, and works on."""
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group, timeout=6.0)
    take_steps(net, optimizer, rank, range(5))
    begun, text = time.monotonic(), ""
    if rank == 0:
        try:
            handle.finish()
        except oktopk.ExchangeError as error:
            text = str(error)
    else:
        time.sleep(8)
    handle.close()
    return text, time.monotonic() - begun


def test_a_rank_that_does_not_finish_is_an_error_of_the_others_within_the_timeout(worlds):
    (text, seconds), _ = worlds.run(2, never_finished)
    assert "has not called finish()" in text and seconds < 20


def broken_block(group) -> str:
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group, timeout=20.0)
    try:
        with handle:
            take_steps(net, optimizer, rank, range(5))
            if rank == 1:
                raise KeyError("batch")
    except (KeyError, oktopk.ExchangeError) as error:
        assert handle.closed
        return repr(error)
    return "no error"


def test_an_error_in_the_block_closes_without_waiting(worlds):
    one, other = worlds.run(2, broken_block)
    assert "rank 1" in one and one.startswith("ExchangeError")
    assert other == "KeyError('batch')"


def different_fragments(comm) -> str:
    """Rank 1 asks for an exchange where the others are at the second fragment."""
    net, optimizer, handle = start(comm, every=4, fragments=2)
    try:
        take_steps(net, optimizer, comm.rank, range(7 if comm.rank else 8))
        handle.exchange()
    except ValueError as error:
        return str(error)
    return ""


def test_exchanges_of_different_fragments_are_an_error_on_all_ranks():
    for text in simulate(3, different_fragments):
        assert "exchange different fragments: 1 on rank 0 and 0 on ranks 1, 2;" in text


# What is said.


def slipped(comm) -> None:
    """Rank 1 asks for an exchange where the others come to theirs by themselves."""
    net, optimizer, handle = start(comm)
    take_steps(net, optimizer, comm.rank, range(4))
    for _ in range(2):
        take_steps(net, optimizer, comm.rank, range(3 if comm.rank == 1 else 4))
        if comm.rank == 1:
            handle.exchange()
    assert handle.step == 3
    handle.close()


def test_different_numbers_of_steps_are_said_once(caplog, capfd):
    simulate(3, slipped)
    (text,) = said(caplog, "different numbers of steps")
    assert text.startswith("exchange 1: ") and "steps, 8 on ranks 0, 2 and 7 on rank 1: let" in text
    caplog.clear()
    simulate(2, lambda comm: uneven(comm, [5, 13], {}))
    text = capfd.readouterr().err + "".join(said(caplog, "different numbers of steps"))
    assert "exchange 1: the ranks have taken different numbers of steps, 5 on rank 0 and 8" in text
    assert text.count("; rank 0 called finish() and will answer until all have") == 1
    caplog.clear()
    simulate(2, lambda comm: uneven(comm, [5, 5], {}))
    assert "different" not in capfd.readouterr().err + "".join(said(caplog, ""))


def slipped_at_once(comm, ends_by: str) -> None:
    """Rank 1 is a step behind when the first exchange begins, or in `finish` already."""
    net, optimizer, handle = start(comm)
    take_steps(net, optimizer, comm.rank, range(2 if comm.rank == 1 else 3))
    if comm.rank == 0 or ends_by == "exchange":
        handle.exchange()
    if ends_by == "finish":
        handle.finish()
    handle.close()


@pytest.mark.parametrize("ends_by", ["exchange", "finish"])
def test_the_first_exchange_warns_of_different_numbers_as_any_other(caplog, capfd, ends_by):
    simulate(2, lambda comm: slipped_at_once(comm, ends_by))
    text = capfd.readouterr().err + "".join(said(caplog, "different numbers of steps"))
    assert "exchange 0: the ranks have taken different numbers of steps, 3 on rank 0 and 2" in text


# All ranks make the same moves.

SAME = "ranks have moved their weights by the same, to the bit"


def reduced(group, by_hand: bool, options: dict) -> None:
    """Something else than local steps averages the gradients in every step."""
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group, verbose=False, **options)
    model = net if by_hand else DistributedDataParallel(net, process_group=group)
    for step in range(8):
        optimizer.zero_grad()
        x = torch.full((4, 20), 1.0 + rank + step)
        model(x).square().mean().backward()
        for p in net.parameters() if by_hand else ():
            dist.all_reduce(p.grad, group=group)
        optimizer.step()
    dist.barrier(group)
    handle.close()


def lines_of(group, act, *args) -> list[str]:
    """What `act` says at the level of warnings."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Lines()
    logging.getLogger("oktopk").addHandler(handler)
    try:
        act(group, *args)
    finally:
        logging.getLogger("oktopk").removeHandler(handler)
    return lines


@pytest.mark.parametrize("options", [{}, {"delay": 1, "fragments": 2}], ids=str)
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_dense_exchange_of_the_same_ranks_is_noticed_in_the_first_exchange(
    worlds, by_hand, options
):
    one, *others = worlds.run(3, lines_of, reduced, by_hand, options)
    assert [SAME in line for line in one] == [True] and others == [[], []]


def by_data(comm, same_data: bool, first_lr: float) -> None:
    net, optimizer, handle = start(comm, verbose=False)
    for group in optimizer.param_groups:
        group["lr"] = first_lr
    take_steps(net, optimizer, 0 if same_data else comm.rank, range(4))
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    take_steps(net, optimizer, 0 if same_data else comm.rank, range(4, 8))
    handle.close()


@pytest.mark.parametrize("first_lr", [0.0, 0.01])
def test_the_same_batches_are_noticed_and_others_are_not(caplog, first_lr):
    simulate(2, lambda comm: by_data(comm, True, first_lr))
    assert len(said(caplog, SAME)) == 1
    caplog.clear()
    simulate(2, lambda comm: by_data(comm, False, first_lr))
    simulate(1, lambda comm: by_data(comm, True, first_lr))
    assert said(caplog, SAME) == []
