# SPDX-License-Identifier: Apache-2.0
"""Local steps are what they say: references of a few lines, resume, and what goes wrong."""

from __future__ import annotations

import copy
import io
import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import Net, batch
from oktopk import METHODS, simulate
from rounds import LOCAL, changes_of, same, start, take_steps, two_levels, weights_of
from streams import STREAMS
from worlds import forkserver

over_methods = pytest.mark.parametrize("method", METHODS)
SPARSE_ONLY = oktopk.Policy(vectors=False, below=0)


# The algorithm, against references of a few lines.


def sgd_every_step(comm, method: str) -> tuple:
    """Weights by local steps with `every=1`, and by sparse gradients; whole numbers are exact."""
    n, lr, how = 300, 0.25, {"method": method, "density": 0.1}
    weights = torch.nn.Parameter(torch.zeros(n, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weights], lr=lr)
    how_locally = {**how, "every": 1, "decay": 1.0, "average": "all", "policy": SPARSE_ONLY}
    model = torch.nn.ParameterList([weights])
    oktopk.local_steps(model, optimizer, comm=comm.split([range(comm.size)]), **how_locally)
    reducer, reference = oktopk.Reducer(n, comm=comm, **how), torch.zeros(n, dtype=torch.float64)
    for step in range(40):
        grad = STREAMS["whole"](n, comm.rank, step)
        weights.grad = grad.clone().view(n, 1)
        optimizer.step()
        reducer.reduce_(grad)
        reference -= lr * grad
    return weights.detach().view(-1), reference


@over_methods
@pytest.mark.parametrize("P", [1, 2, 4])
def test_every_step_with_plain_sgd_is_sparse_gradients(P, method):
    for weights, reference in simulate(P, lambda comm: sgd_every_step(comm, method)):
        assert torch.equal(weights, reference)


def diloco(P: int, rounds: int, every: int, lr: float, momentum: float) -> dict:
    """DiLoCo (Douillard et al. 2023): inner AdamW on each worker, outer Nesterov SGD."""
    torch.manual_seed(0)
    outer = Net()
    buffers = [torch.zeros_like(p) for p in outer.parameters()]
    nets = [copy.deepcopy(outer) for _ in range(P)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    for number in range(rounds):
        for rank in range(P):
            steps = range(number * every, (number + 1) * every)
            take_steps(nets[rank], optimizers[rank], rank, steps)
        every_net = (net.parameters() for net in (outer, *nets))
        for buffer, p, *theirs in zip(buffers, *every_net, strict=True):
            grad = sum(p.detach() - each.detach() for each in theirs) / P
            buffer.copy_(momentum * buffer + grad)
            p.detach().copy_(p.detach() - lr * (grad + momentum * buffer))
        for net in nets:
            net.load_state_dict(outer.state_dict())
    return weights_of(outer)


def by_local_steps(comm, rounds: int, **more) -> dict:
    net, optimizer, handle = start(comm, density=1.0, **more)
    take_steps(net, optimizer, comm.rank, range(rounds * handle.driver.options.every))
    assert handle.step == rounds
    return weights_of(net)


@over_methods
@pytest.mark.parametrize("P", [1, 2, 3])
def test_density_one_with_nesterov_is_diloco(P, method):
    # as a simulated rank: those have one thread, which shows in the bits of a product of matrices
    (reference,) = simulate(1, lambda _: diloco(P, rounds=5, every=4, lr=0.7, momentum=0.9))
    more = {"outer_lr": 0.7, "outer_momentum": 0.9, "average": "all", "method": method}
    for weights in simulate(P, lambda comm: by_local_steps(comm, 5, **more)):
        assert same(weights, reference)


def one_exchange(comm, average: str, method: str) -> tuple:
    """Rank r has changed entries 0 to r, each by r + 1, and all of them are sent."""
    weights = torch.nn.Parameter(torch.zeros(comm.size + 1, 1))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    more = {"average": average, "every": 1, "density": 1.0, "policy": SPARSE_ONLY}
    more |= {"method": method}
    model = torch.nn.ParameterList([weights])
    handle = oktopk.local_steps(model, optimizer, comm=comm, **more)
    weights.grad = torch.zeros_like(weights)
    weights.grad[: comm.rank + 1] = -(comm.rank + 1.0)
    optimizer.step()
    return weights.detach().view(-1).tolist(), [r.any().item() for r in handle.residuals.values()]


@over_methods
def test_an_entry_is_divided_by_those_who_sent_it(method):
    """Ranks 0, 1, 2 change an entry by 1, 2, 3; entry 1 by ranks 1 and 2, entry 2 by rank 2."""
    over_all = pytest.approx([2.0, 5 / 3, 1.0, 0.0])
    over_senders = over_all if method == "dense" else [2.0, 2.5, 3.0, 0.0]
    for average, expected in (("all", over_all), ("senders", over_senders)):
        ranks = simulate(3, partial(one_exchange, average=average, method=method))
        for weights, has_residual in ranks:
            assert weights == expected and not any(has_residual)


def bytes_of_rounds(comm, average: str, method: str) -> list[tuple[int, int]]:
    seen = []
    more = {"average": average, "method": method, "on_step": seen.append, "every": 1}
    net, optimizer, handle = start(comm, wire="plain", **more)
    before = handle.comm.ledger.total()
    take_steps(net, optimizer, comm.rank, range(1))
    handshake = handle.comm.ledger.stages.get("handshake")
    sent = (handle.comm.ledger.total() - before).sent - (handshake.sent if handshake else 0)
    assert sent == sum(stats.bytes_sent for stats in seen)
    return [(stats.bytes_sent, stats.entries_sent) for stats in seen]


@over_methods
def test_counting_the_senders_costs_no_byte(method):
    """The ledger has what the statistics say; `gtopk` sends one more word per entry upwards."""
    for_all = simulate(4, lambda comm: bytes_of_rounds(comm, "all", method))
    for_senders = simulate(4, lambda comm: bytes_of_rounds(comm, "senders", method))
    if method != "gtopk":
        assert for_senders == for_all
        return
    for (sent, entries), (others, same_entries) in zip(
        (rank[0] for rank in for_senders[1:]), (rank[0] for rank in for_all[1:]), strict=True
    ):
        assert entries == same_entries and 0 < sent - others <= 4 * entries


# Weights: start, precision, and which parameters take part.


def started(group) -> tuple:
    rank = dist.get_rank(group)
    net, _, handle = start(group, seed=rank)
    weights = weights_of(net)
    handle.close()
    return weights, handle.comm.ledger.stages["start"].payload_sent


def test_all_ranks_start_with_the_weights_of_rank_0(worlds):
    torch.manual_seed(0)
    expected = weights_of(Net())
    nbytes = sum(p.nbytes for p in expected.values())
    for rank, (weights, sent) in enumerate(worlds.run(3, started)):
        assert same(weights, expected)
        assert sent == (0 if rank else 2 * nbytes)


def trained(group, dtype, steps: int, more: dict) -> tuple:
    rank, own = dist.get_rank(group), []
    net, optimizer, handle = start(group, dtype=dtype, **more)
    for step in range(steps):
        take_steps(net, optimizer, rank, range(step, step + 1))
        own.append((weights_of(net), handle.driver.anchor.clone(), handle.local_steps))
    dist.barrier(group)
    handle.close()
    return own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("average", ["all", "senders"])
def test_weights_are_equal_after_each_exchange_and_only_then(worlds, dtype, average):
    ranks = worlds.run(3, trained, dtype, 9, {"average": average})
    for states in zip(*ranks, strict=True):
        weights = [each for each, _, _ in states]
        assert all(torch.equal(anchor, states[0][1]) for _, anchor, _ in states)
        all_equal = all(same(each, weights[0]) for each in weights)
        assert all_equal == (states[0][2] == 0)


def tiny_outer_steps(comm) -> tuple:
    """Outer steps below half a unit of the last place of the bf16 weight."""
    weights = torch.nn.Parameter(torch.full((4, 1), 1.0, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    more = {"every": 1, "density": 1.0, "policy": SPARSE_ONLY, "outer_lr": 2.0**-6}
    handle = oktopk.local_steps(torch.nn.ParameterList([weights]), optimizer, comm=comm, **more)
    for _ in range(16):
        weights.grad = torch.full_like(weights, 2.0**-4)
        optimizer.step()
    return weights.detach().view(-1).tolist(), handle.driver.anchor.tolist()


def test_small_outer_steps_add_up_in_bf16():
    for weights, anchor in simulate(2, tiny_outer_steps):
        assert anchor == [1.0 - 16 * 2.0**-10] * 4
        assert weights == torch.tensor(anchor).bfloat16().tolist() != [1.0] * 4


class Branched(Net):
    """`branch` is used by rank 0 only, and `head` is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)


def partly(group) -> tuple:
    rank = dist.get_rank(group)
    torch.manual_seed(rank)
    net = Branched()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    handle = oktopk.local_steps(net, optimizer, group=group, **LOCAL)
    before = weights_of(net)
    for step in range(8):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        cross_entropy(net(x, use_branch=rank == 0), y).backward()
        optimizer.step()
    state, after, said = handle.state_dict(), weights_of(net), ""
    net.head.requires_grad_(rank == 1)
    try:
        handle.exchange()
    except (ValueError, oktopk.ExchangeError) as error:
        said = str(error)
    handle.close()
    return before, after, set(state["residuals"]), said


def test_parameters_that_are_frozen_or_without_gradient(worlds):
    ranks = worlds.run(2, partly)
    for before, after, names, _ in ranks:
        assert same(after, ranks[0][1])
        assert torch.equal(after["head.weight"], before["head.weight"])
        assert not torch.equal(after["branch.weight"], before["branch.weight"])
        assert names == {name for name in after if not name.startswith("head")}
    assert "rank 1 failed in step 2: ValueError: rank 1, exchange 2: ['head.weight'" in ranks[0][3]
    assert "did not require gradients when local_steps was called: close()" in ranks[1][3]


# Counting steps.


class Twice(torch.optim.SGD):
    """The `step` of a subclass calls that of its parent, whose hooks run too."""

    def step(self, closure=None):
        return super().step(closure)


def counted(kind, wrap=lambda optimizer: optimizer, broken: bool = False) -> int:
    weights = torch.nn.Parameter(torch.ones(4, 1))
    torch.optim.SGD([weights], lr=1.0)  # so that torch has patched the parent too
    optimizer = kind([weights], lr=0.1)
    model = torch.nn.ParameterList([weights])
    handle = oktopk.local_steps(model, wrap(optimizer), every=100)

    def closure():
        weights.grad = torch.ones_like(weights)
        if broken:
            raise ArithmeticError
        return weights.sum()

    for _ in range(3):
        try:
            optimizer.step(closure)
        except ArithmeticError:
            continue
    broken = False
    optimizer.step(closure)
    handle.close()
    optimizer.step(closure)
    return handle.local_steps


def test_each_optimizer_step_counts_once():
    assert counted(torch.optim.SGD) == counted(Twice) == 4
    assert counted(torch.optim.SGD, broken=True) == counted(Twice, broken=True) == 1
    schedule = torch.optim.lr_scheduler.StepLR
    assert counted(Twice, lambda optimizer: schedule(optimizer, step_size=9)) == 4


def at_the_end(comm) -> list:
    net, optimizer, handle = start(comm)
    take_steps(net, optimizer, comm.rank, range(6))
    inside = handle.local_steps
    stats = handle.exchange()
    return [inside, handle.local_steps, stats.step, handle.step, weights_of(net)]


def test_an_exchange_can_be_asked_for():
    ranks = simulate(2, at_the_end)
    assert all(rank[:4] == [2, 0, 1, 2] and same(rank[4], ranks[0][4]) for rank in ranks)


# Stop and resume.


def resumed(group, stop: int, steps: int, more: dict) -> tuple:
    """Weights, residuals and statistics of a run without and of one with a stop."""
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group, **more)
    take_steps(net, optimizer, rank, range(steps))
    straight = weights_of(net), handle.state_dict(), handle.stats.bytes_sent
    dist.barrier(group)
    handle.close()
    net, optimizer, handle = start(group, **more)
    take_steps(net, optimizer, rank, range(stop))
    buffer = io.BytesIO()
    torch.save([optimizer.state_dict(), handle.state_dict()], buffer)
    dist.barrier(group)
    handle.close()
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    net, optimizer, handle = start(group, seed=1 + rank, **more)
    optimizer.load_state_dict(saved[0])
    handle.load_state_dict(saved[1])
    take_steps(net, optimizer, rank, range(stop, steps))
    again = weights_of(net), handle.state_dict(), handle.stats.bytes_sent
    dist.barrier(group)
    handle.close()
    return straight, again


RESUMED = {
    "fp32": {},
    "over all": {"average": "all", "outer_momentum": 0.0, "decay": 1.0, "exact_every": 2},
    "bf16": {"dtype": torch.bfloat16},
    "dense": {"method": "dense"},
}


@pytest.mark.parametrize("how", RESUMED)
@pytest.mark.parametrize("stop", [0, 3, 4, 9])
def test_a_resumed_run_has_the_same_bits(worlds, how, stop):
    for straight, again in worlds.run(3, resumed, stop, 14, RESUMED[how]):
        assert same(straight[0], again[0])
        for key in ("residuals", "anchor", "weights", "momentum"):
            assert same(straight[1][key], again[1][key]), key
        assert straight[1]["metadata"] == again[1]["metadata"]
        assert straight[2] == again[2]


def hand_over(group, states: list | None, gathered: bool) -> dict:
    """Train into the second round, or load what another number of ranks saved; then save."""
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group)
    if states is None:
        take_steps(net, optimizer, rank, range(6))
    else:
        handle.load_state_dict(states)
    state = handle.gathered_state_dict() if gathered else handle.state_dict()
    if states is not None:
        take_steps(net, optimizer, rank, range(6, 8))
        assert handle.local_steps == 0 and handle.step == 2
        check = [weights_of(net), state]
    else:
        check = [None, state]
    dist.barrier(group)
    handle.close()
    return check


@pytest.mark.parametrize("gathered", [False, True])
def test_another_number_of_ranks_takes_over_inside_a_round(worlds, gathered):
    """The sum over ranks of what was not exchanged stays, and so does what all have in common."""
    first = [state for _, state in worlds.run(4, hand_over, None, gathered)]
    saved = first[0] if gathered else first
    had = [changes_of(s) for s in (first[0]["ranks"] if gathered else first)]
    for P in (2, 3, 5):
        ranks = worlds.run(P, hand_over, saved, gathered)
        assert all(same(weights, ranks[0][0]) for weights, _ in ranks)
        states = ranks[0][1]["ranks"] if gathered else [state for _, state in ranks]
        have = [changes_of(state) for state in states]
        for name in had[0]:
            torch.testing.assert_close(
                sum(each[name] for each in have), sum(each[name] for each in had)
            )
        before = (first[0]["ranks"] if gathered else first)[0]
        for state in states:
            assert same(state["anchor"], before["anchor"])
            assert same(state["momentum"], before["momentum"])


def fewer_ranks(comm, states: list) -> dict:
    _, _, handle = start(comm)
    handle.load_state_dict(states)
    return handle.state_dict()


def inside_a_round(comm) -> dict:
    net, optimizer, handle = start(comm)
    take_steps(net, optimizer, comm.rank, range(6))
    return handle.state_dict()


def test_a_round_that_is_not_finite_is_not_taken_over():
    states = simulate(3, inside_a_round)
    before = copy.deepcopy(states)
    states[2]["weights"]["head.bias"][0] = float("nan")
    first, second = simulate(2, lambda comm: fewer_ranks(comm, states))
    for name, residual in first["residuals"].items():
        had = before[0]["residuals"][name] + before[2]["residuals"][name]
        torch.testing.assert_close(residual, had)
    assert same(second["residuals"], before[1]["residuals"])
    assert same(first["weights"], before[0]["weights"])


def load_of_other_kind(group) -> tuple:
    _, _, handle = start(group)
    model = DistributedDataParallel(Net(), process_group=group)
    attached = oktopk.attach(model, warmup_steps=0)
    said = []
    for loads, state in ((handle, attached.state_dict()), (attached, handle.state_dict())):
        try:
            loads.load_state_dict(state)
        except ValueError as error:
            said.append(str(error))
    wrong = handle.state_dict()
    wrong["anchor"]["head.bias"][0] = float("nan")
    with pytest.raises(ValueError, match=r"rank \d: the anchor of 'head.bias' has a NaN"):
        handle.load_state_dict(wrong)
    wrong = {key: value for key, value in handle.state_dict().items() if key != "weights"}
    with pytest.raises(ValueError, match="not a state of local_steps: expected one with"):
        handle.load_state_dict(wrong)
    dist.barrier(group)
    handle.close()
    attached.close()
    return tuple(said)


def test_states_that_do_not_fit_are_refused(worlds):
    for into_local, into_attached in worlds.run(2, load_of_other_kind):
        assert "the state has residuals of gradients, and weight changes are" in into_local
        assert "the state has residuals of weight changes, and gradients are" in into_attached


# What goes wrong on one rank is seen by all.


def nan_on_one_rank(group, on_nonfinite: str) -> tuple:
    rank, seen, told = dist.get_rank(group), [], []
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("oktopk").addHandler(handler)
    more = {"on_nonfinite": on_nonfinite, "on_step": seen.append}
    net, optimizer, handle = start(group, **more)
    take_steps(net, optimizer, rank, range(5))
    before, step_before = handle.state_dict(), handle.step
    moments = copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        net.middle.weight[0, 0] *= float("nan") if rank == 1 else 1e20
    try:
        take_steps(net, optimizer, rank, range(5, 8))
    except oktopk.NonfiniteError as error:
        told.append(str(error))
    after = handle.state_dict()
    optimizer.load_state_dict(moments)  # as the guide says: Adam's moments are not finite either
    take_steps(net, optimizer, rank, range(8, 12))
    logging.getLogger("oktopk").removeHandler(handler)
    dist.barrier(group)
    handle.close()
    return before, after, [s.skipped for s in seen], told, lines, weights_of(net), step_before


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_a_nan_on_one_rank_rolls_the_round_back_on_all(worlds, on_nonfinite):
    ranks = worlds.run(3, nan_on_one_rank, on_nonfinite)
    for rank, (before, after, skipped, told, lines, weights, step) in enumerate(ranks):
        assert skipped == [False, True, False] and step == 1
        for key in ("residuals", "anchor", "momentum"):
            assert same(before[key], after[key]), key
        assert same(after["weights"], {n: a.float() for n, a in before["anchor"].items()})
        assert bool(told) == (on_nonfinite == "raise")
        if told:
            assert (
                told[0] == f"rank {rank}, exchange 1: a weight change had a NaN or Inf on some rank"
            )
        named = [line for line in lines if "weights of this rank are not finite" in line]
        assert len(named) == (rank == 1)
        assert not named or ("in inner.weight, " in named[0] and " and 8 more; " in named[0])
        assert same(weights, ranks[0][5])


def drifting(group) -> str:
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group)
    take_steps(net, optimizer, rank, range(8))
    if rank == 2:
        handle.driver.anchor[100] += 1
        handle.driver.return_to_anchor()
    try:
        take_steps(net, optimizer, rank, range(8, 16))
    except oktopk.ReplicaError as error:
        return str(error)
    finally:
        handle.close()
    return "no error"


def test_ranks_that_drifted_apart_are_named(worlds):
    for rank, said in enumerate(worlds.run(3, drifting)):
        expected = f"rank {rank}, step 2: the weights of 'inner.weight' differ between rank 0 and"
        assert said == f"{expected} rank 2"


def start_badly(group, more: dict) -> str:
    rank = dist.get_rank(group)
    try:
        start(group, timeout=20.0, **(more if rank == 1 else {}))
    except (ValueError, oktopk.ExchangeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"every": 5}, "every is 4 on ranks 0, 2 but 5 on rank 1"),
        ({"average": "all"}, "average is senders on ranks 0, 2 but all on rank 1"),
        ({"dtype": torch.bfloat16}, "parameter 'inner.weight' is "),
    ],
)
def test_ranks_with_other_settings_all_raise(worlds, more, said):
    for text in worlds.run(3, start_badly, more):
        assert "the ranks disagree: " in text and said in text


def test_misuse_is_named():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    frozen = Net().requires_grad_(False)
    cases = [
        ((3, optimizer), {}, "local_steps needs a torch.nn.Module, got int"),
        ((net, 3), {}, "expected an optimizer or a scheduler, got int"),
        ((Net(), optimizer), {}, "SGD has none of the model's parameters"),
        ((frozen, optimizer), {}, "no parameter of this model requires gradients"),
        ((net, optimizer), {"every": 0}, "every must be 1 or more, got 0"),
        ((net, optimizer), {"outer_lr": 0}, "outer_lr must be more than 0 and finite, got 0.0"),
        ((net, optimizer), {"outer_momentum": 1.0}, "outer_momentum must be in [0, 1), got 1.0"),
        ((net, optimizer), {"decay": 1.5}, "decay must be in [0, 1], got 1.5"),
        ((net, optimizer), {"average": "some"}, "average must be one of all, senders, got 'some'"),
        ((net, optimizer), {"on_nonfinite": "deliver"}, "on_nonfinite must be one of skip, raise"),
        ((net, optimizer), {"check_every": -1}, "check_every must be 0 or more, got -1"),
    ]
    handle = oktopk.local_steps(net, other := torch.optim.SGD(net.parameters(), lr=0.1))
    cases.append(((net, other), {}, "this optimizer has local steps already"))
    for args, more, said in cases:
        with pytest.raises((TypeError, ValueError)) as error:
            oktopk.local_steps(*args, **more)
        assert said in str(error.value)
    handle.close()
    oktopk.local_steps(net, other).close()


def test_one_process_needs_no_process_group():
    net, optimizer, handle = start(None)
    take_steps(net, optimizer, 0, range(9))
    assert handle.step == 2 and handle.stats.bytes_sent == 0
    handle.close()
    take_steps(net, optimizer, 0, range(9, 16))
    assert handle.step == 2 and handle.closed
    with pytest.raises(RuntimeError, match="was closed"):
        handle.exchange()
    with pytest.raises(RuntimeError, match="was closed"), handle:
        take_steps(net, optimizer, 0, range(16, 17))


# DDP inside a site, local steps between sites.


@pytest.mark.timeout(90)
def test_ddp_inside_a_site_and_local_steps_across(tmp_path):
    """In processes of their own: torch asks that the ranks of a group are in equally many groups,
    and those of `worlds` are not."""
    start_rank = partial(forkserver().Process, target=two_levels)
    processes = [start_rank(args=(rank, str(tmp_path))) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    ranks = [torch.load(tmp_path / f"rank-{rank}") for rank in range(4)]
    for step in range(9):
        weights = [seen[step][0] for seen, _, _ in ranks]
        assert same(weights[0], weights[1]) and same(weights[2], weights[3])
        assert same(weights[0], weights[2]) == (ranks[0][0][step][1] == 0)
    assert all(size == 2 and sent > 0 for _, size, sent in ranks)
