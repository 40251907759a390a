# SPDX-License-Identifier: Apache-2.0
"""Local steps with a delay: the exchange runs in the background and is applied later."""

from __future__ import annotations

import copy
import signal
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import oktopk
from idioms import Net
from oktopk import METHODS, simulate
from oktopk.adapters import thread as background
from rounds import changes_of, same, same_state, start, take_steps, weights_of
from streams import STREAMS

SPARSE_ONLY = oktopk.Policy(vectors=False, below=0)
N, LR = 300, 0.25


# The algorithm, against references of a few lines.


def delayed_diloco(P: int, steps: int, every: int, delay: int, mixing: float) -> list[dict]:
    """DiLoCo whose outer step, with learning rate 0.7 and momentum 0.9, is applied later."""
    torch.manual_seed(0)
    outer = Net()
    buffers = [torch.zeros_like(p) for p in outer.parameters()]
    nets = [copy.deepcopy(outer) for _ in range(P)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    launched = None
    for step in range(1, steps + 1):
        for rank in range(P):
            take_steps(nets[rank], optimizers[rank], rank, range(step - 1, step))
        if launched is not None and step % every == delay:
            for net, before in zip(nets, launched, strict=True):
                for name, p in net.named_parameters():
                    moves = (p.detach() - before[name]) * mixing
                    p.detach().copy_(outer.get_parameter(name).detach() + moves)
        if step % every == 0:
            launched = [weights_of(net) for net in nets]
            every_net = (net.parameters() for net in (outer, *nets))
            for buffer, p, *theirs in zip(buffers, *every_net, strict=True):
                grad = sum(p.detach() - each.detach() for each in theirs) / P
                buffer.copy_(0.9 * buffer + grad)
                p.detach().copy_(p.detach() - 0.7 * (grad + 0.9 * buffer))
    return [weights_of(net) for net in nets]


def by_local_steps(comm, steps: int, **more) -> dict:
    net, optimizer, handle = start(comm, density=1.0, average="all", **more)
    take_steps(net, optimizer, comm.rank, range(steps))
    handle.close()
    return weights_of(net)


@pytest.mark.parametrize(("delay", "mixing"), [(1, 1.0), (3, 1.0), (3, 0.5), (2, 0.0)])
@pytest.mark.parametrize("P", [1, 3])
def test_density_one_is_diloco_with_a_delayed_outer_step(P, delay, mixing):
    steps = 19  # the last exchange is in flight where the delay is 3, and was applied else
    (reference,) = simulate(1, lambda _: delayed_diloco(P, steps, 4, delay, mixing))
    more = {"outer_lr": 0.7, "outer_momentum": 0.9, "delay": delay, "mixing": mixing}
    ranks = simulate(P, lambda comm: by_local_steps(comm, steps, **more))
    for weights, expected in zip(ranks, reference, strict=True):
        assert same(weights, expected)


def delayed_reducer(comm, every: int, delay: int, how: dict) -> list[torch.Tensor]:
    """The weights after each step, where a `Reducer` exchanges the change at once."""
    weights, anchor = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    reducer, launched, seen = oktopk.Reducer(N, comm=comm, **how), None, []
    for step in range(1, 30):
        weights = weights - LR * STREAMS["whole"](N, comm.rank, step)
        if launched is not None and step % every == delay:
            weights = anchor + (weights - launched)
        if step % every == 0:
            launched, change = weights.clone(), anchor - weights
            reducer.reduce_(change)
            anchor = anchor - change
        seen.append(weights.clone())
    return seen


def one_vector(comm, **more) -> tuple:
    weights = torch.nn.Parameter(torch.zeros(N, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weights], lr=LR)
    how = {"comm": comm, "policy": SPARSE_ONLY, "average": "all", "decay": 1.0} | more
    return (
        weights,
        optimizer,
        oktopk.local_steps(torch.nn.ParameterList([weights]), optimizer, **how),
    )


def step_of_vector(weights, optimizer, rank: int, step: int) -> torch.Tensor:
    grad = STREAMS["whole"](N, rank, step)
    weights.grad = grad.clone().view(N, 1)
    optimizer.step()
    return LR * grad


def delayed_vector(comm, every: int, delay: int, how: dict) -> list[torch.Tensor]:
    weights, optimizer, handle = one_vector(comm, every=every, delay=delay, **how)
    seen = []
    for step in range(1, 30):
        step_of_vector(weights, optimizer, comm.rank, step)
        seen.append(weights.detach().clone().view(-1))
    handle.close()
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_a_sparse_exchange_is_that_of_a_reducer_and_is_applied_later(method):
    args = (5, 3, {"method": method, "density": 0.1, "exact_every": 2})
    expected = simulate(3, lambda comm: delayed_reducer(comm, *args))
    for mine, theirs in zip(
        simulate(3, lambda comm: delayed_vector(comm, *args)), expected, strict=True
    ):
        assert all(map(torch.equal, mine, theirs))


def accounts(comm, mixing: float) -> list[tuple]:
    """After each step: all moves of this rank, the anchor, and what it has not exchanged."""
    more = {"every": 4, "delay": 2, "density": 0.1, "mixing": mixing}
    weights, optimizer, handle = one_vector(comm, **more)
    moves, seen = torch.zeros(N, dtype=torch.float64), []
    for step in range(22):
        moves += step_of_vector(weights, optimizer, comm.rank, step)
        state = handle.state_dict()
        (unsent,) = changes_of(state).values()
        (anchor,) = state["anchor"].values()
        seen.append((moves.clone(), anchor.view(-1), unsent.view(-1), bool(state["launched"])))
    handle.close()
    return seen


@pytest.mark.parametrize("mixing", [1.0, 0.5])
def test_nothing_is_lost_and_nothing_counts_twice(mixing):
    """Moves of all ranks = what the anchor has moved by + what they have not exchanged."""
    ranks, balanced = simulate(4, lambda comm: accounts(comm, mixing)), []
    for step in zip(*ranks, strict=True):
        moves, anchors, unsent, _ = zip(*step, strict=True)
        assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
        balanced.append(torch.equal(sum(moves), -4 * anchors[0] + sum(unsent)))
    assert [step[0][3] for step in zip(*ranks, strict=True)][2:9] == [0, 1, 1, 0, 0, 1, 1]
    assert all(balanced[:5]) and all(balanced) == (mixing == 1)


# With real ranks.


def watched(group, dtype) -> tuple:
    """After each step: anchor, weights and counters; and at each landing the weights before it,
    those at the launch, and what came of them."""
    rank, seen, landings, exchanges = dist.get_rank(group), [], [], []
    more = {"delay": 2, "on_step": exchanges.append}
    net, optimizer, handle = start(group, dtype=dtype, **more)
    driver = handle.driver
    land = driver.land

    def note_landing(number):
        noted = [driver.in_flight.weights, weights_of(net)]
        stats = land(number)
        anchor = {name: x.clone() for name, x in driver.views(driver.anchor).items()}
        landings.append((*noted, anchor, weights_of(net)))
        return stats

    driver.land = note_landing
    for step in range(13):
        take_steps(net, optimizer, rank, range(step, step + 1))
        state = handle.state_dict()
        seen.append((state["anchor"], weights_of(net), handle.step, handle.local_steps))
    dist.barrier(group)
    handle.close()
    assert [stats.step for stats in exchanges] == [0, 1]
    assert all(stats.bytes_sent > 0 for stats in exchanges)
    return seen, landings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_anchors_are_equal_and_own_moves_stay_on_top_of_them(worlds, dtype):
    ranks = worlds.run(3, watched, dtype)
    for seen, landings in ranks:
        assert [step for _, _, step, _ in seen] == [0] * 5 + [1] * 4 + [2] * 4
        assert [steps for *_, steps in seen] == [1, 2, 3, 0] * 3 + [1]
        for launched, before, anchor, after in landings:
            assert not same(launched, before), "the rank has moved meanwhile"
            for name, p in anchor.items():
                moves = before[name].float() - launched[name].float()
                assert torch.equal(after[name], (p + moves).to(dtype))
    for states in zip(*(seen for seen, _ in ranks), strict=True):
        assert all(same(anchor, states[0][0]) for anchor, *_ in states)
        assert not all(same(weights, states[0][1]) for _, weights, *_ in states)


def ended(comm) -> tuple:
    net, optimizer, handle = start(comm, delay=2)
    take_steps(net, optimizer, comm.rank, range(5))
    before = handle.step, handle.local_steps, len(handle.state_dict()["launched"])
    stats = handle.exchange()
    after = handle.step, handle.local_steps, len(handle.state_dict()["launched"])
    handle.close()
    return before, after, stats.step, weights_of(net)


def test_an_exchange_that_is_asked_for_applies_what_is_in_flight_and_then_itself():
    ranks = simulate(3, ended)
    for before, after, step, weights in ranks:
        assert before == (0, 1, 12) and after == (2, 0, 0) and step == 1
        assert same(weights, ranks[0][3])


# Stop and resume.


def resumed(comm, steps: int, stops: range, more: dict) -> list[bool]:
    """Whether a run that stopped and resumed ends with the bits of one that never did."""
    net, optimizer, handle = start(comm, **more)
    saved = []
    for step in range(steps):
        if step in stops:
            state = handle.state_dict(), optimizer.state_dict()
            saved.append((step, copy.deepcopy(state), handle.step))
        take_steps(net, optimizer, comm.rank, range(step, step + 1))
    straight = handle.state_dict(), handle.stats.bytes_sent, handle.step
    handle.close()
    comm.is_attached, equal = False, []
    for step, (state, moments), count in saved:
        net, optimizer, handle = start(comm, seed=1, **more)
        optimizer.load_state_dict(moments)
        handle.load_state_dict(state)
        equal.append(handle.step == count and same_state(state, handle.state_dict()))
        take_steps(net, optimizer, comm.rank, range(step, steps))
        again = handle.state_dict(), handle.stats.bytes_sent, handle.step
        equal.append(same_state(straight[0], again[0]) and straight[1:] == again[1:])
        handle.close()
    return equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_same_bits_at_every_step_of_two_rounds(dtype):
    more = {"delay": 2, "mixing": 0.75, "dtype": dtype, "exact_every": 2}
    for equal in simulate(3, lambda comm: resumed(comm, 15, range(3, 12), more)):
        assert len(equal) == 18 and all(equal)


def in_flight(comm) -> dict:
    net, optimizer, handle = start(comm, delay=2)
    take_steps(net, optimizer, comm.rank, range(5))
    state = handle.state_dict()
    handle.close()
    return state


def taken_over(comm, states: list) -> dict:
    _, _, handle = start(comm, delay=2)
    handle.load_state_dict(states)
    state = handle.state_dict()
    handle.close()
    return state


@pytest.mark.parametrize("P", [2, 3, 5])
def test_another_number_of_ranks_takes_over_with_an_exchange_in_flight(P):
    states = simulate(4, in_flight)
    had = [changes_of(state) for state in states]
    assert all(state["launched"] for state in states)
    ranks = simulate(P, lambda comm: taken_over(comm, states))
    have = [changes_of(state) for state in ranks]
    for name in had[0]:
        total = sum(each[name] for each in had)
        torch.testing.assert_close(sum(each[name] for each in have), total)
    for state in ranks:
        assert not state["launched"] and not state["launched_stats"]
        assert same(state["anchor"], states[0]["anchor"])


def broken(comm, spoil) -> str:
    net, optimizer, handle = start(comm, delay=2)
    take_steps(net, optimizer, comm.rank, range(5))
    state = spoil(handle.state_dict())
    try:
        handle.load_state_dict(state)
    except ValueError as error:
        return str(error)
    finally:
        handle.close()
    return "no error"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"launched": {}}, "'launched' and 'launched_stats' of the state do not fit"),
        ({"launched_stats": ""}, "'launched' and 'launched_stats' of the state do not fit"),
        ({"launched_stats": "{"}, "'launched_stats' of the state cannot be read"),
        ({"launched_stats": "{}"}, "'launched_stats' of the state cannot be read"),
        ({"launched_stats": 3}, "'launched_stats' of the state cannot be read"),
    ],
)
def test_a_state_that_was_damaged_is_refused(changed, said):
    (text,) = simulate(1, lambda comm: broken(comm, lambda state: state | changed))
    assert text.startswith("rank 0: ") and said in text


def old_state(comm) -> bool:
    net, optimizer, handle = start(comm)
    take_steps(net, optimizer, comm.rank, range(6))
    state = handle.state_dict()
    older = {key: value for key, value in state.items() if not key.startswith("launched")}
    handle.load_state_dict(older)
    return same_state(state, handle.state_dict())


def test_a_state_that_was_saved_before_there_was_a_delay_is_read():
    assert all(simulate(2, old_state))


# What goes wrong on one rank is seen by all.


def nan_on_one_rank(group, when: int, on_nonfinite: str) -> tuple:
    """A NaN on rank 1 before step `when`: 3 is before the launch of the first exchange, 4 is
    between its launch and its landing."""
    rank, seen, told = dist.get_rank(group), [], []
    more = {"on_nonfinite": on_nonfinite, "on_step": seen.append, "delay": 2}
    net, optimizer, handle = start(group, **more)
    first = weights_of(net)
    moments = copy.deepcopy(optimizer.state_dict())
    after = []
    for step in range(16):
        if step == when and rank == 1:
            with torch.no_grad():
                net.middle.weight[0, 0] = float("nan")
        try:
            take_steps(net, optimizer, rank, range(step, step + 1))
        except oktopk.NonfiniteError as error:
            told.append((step, str(error)))
        if seen and seen[-1].skipped and len(after) == 0:
            after.append((step, weights_of(net)))
            optimizer.load_state_dict(moments)
    anchor = handle.state_dict()["anchor"]
    dist.barrier(group)
    handle.close()
    return first, [stats.skipped for stats in seen], told, after, anchor, handle.skipped_steps


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
@pytest.mark.parametrize(("when", "skipped"), [(3, [1, 0, 0]), (4, [0, 1, 0])])
def test_a_nan_before_or_after_the_launch_rolls_a_round_back(worlds, when, skipped, on_nonfinite):
    ranks = worlds.run(3, nan_on_one_rank, when, on_nonfinite)
    for rank, (first, had, told, after, anchor, num) in enumerate(ranks):
        assert had == skipped and num == 1
        ((step, weights),) = after
        assert step == (5 if when == 3 else 9), "at the landing"
        assert same(weights, ranks[0][3][0][1]), "all ranks go back to the anchor"
        assert same(weights, first) == (when == 3), "that of the last exchange"
        assert all(torch.isfinite(x).all() for x in anchor.values())
        expected = (
            f"rank {rank}, exchange {skipped.index(1)}: a weight change had a NaN or Inf on some"
        )
        assert [text[: len(expected)] for _, text in told] == [expected] * (on_nonfinite == "raise")


def fails_in_flight(group) -> list[str]:
    rank, said = dist.get_rank(group), []
    net, optimizer, handle = start(group, delay=2)
    if rank == 1:

        def boom(like):
            raise ArithmeticError("boom")

        handle.driver.engine.begin = boom
    take_steps(net, optimizer, rank, range(4))
    if rank == 1:  # it lands when the others have learned of it
        dist.barrier(group)
    for step in range(4, 7):
        try:
            take_steps(net, optimizer, rank, range(step, step + 1))
        except (ArithmeticError, RuntimeError) as error:
            said.append(f"{step} {type(error).__name__} {error}")
    if rank != 1:
        dist.barrier(group)
    handle.close()
    return said


def test_an_error_in_the_background_is_raised_at_the_landing_and_named_on_all_ranks(worlds):
    for rank, said in enumerate(worlds.run(3, fails_in_flight)):
        first, *later = said
        if rank == 1:
            assert first == "5 ArithmeticError boom"
        else:
            assert first.startswith(f"5 ExchangeError rank {rank}, step 0: ")
            assert "rank 1 failed in step 0: ArithmeticError: boom" in first
        assert [text[:40] for text in later] == ["6 RuntimeError an exchange failed before"]


def threads_of_rounds() -> int:
    return sum(thread.name == "oktopk-rounds" for thread in threading.enumerate())


def closed_in_flight(group) -> tuple:
    rank = dist.get_rank(group)
    before = threads_of_rounds()
    net, optimizer, handle = start(group, delay=2)
    during = threads_of_rounds()
    take_steps(net, optimizer, rank, range(5))
    handle.close()
    weights = weights_of(net)
    take_steps(net, optimizer, rank, range(5, 9))
    refused = ""
    try:
        handle.exchange()
    except RuntimeError as error:
        refused = str(error)
    return before, during, threads_of_rounds(), refused, same(weights, weights_of(net))


def test_closing_with_an_exchange_in_flight_leaves_no_thread(worlds):
    for before, during, after, refused, unchanged in worlds.run(3, closed_in_flight):
        assert during == before + 1 and after == before and not unchanged
        assert "was closed" in refused


def closed_alone(group) -> float:
    """Rank 1 does not launch, so the exchange of rank 0 waits for it while rank 0 closes."""
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group, delay=2, timeout=20.0)
    take_steps(net, optimizer, rank, range(5 if rank == 0 else 2))
    background.CLOSE_SECONDS, begun = 0.2, time.monotonic()
    if rank == 0:
        handle.close()
    took = time.monotonic() - begun
    background.CLOSE_SECONDS = 5.0
    dist.barrier(group)
    handle.close()
    return took


def test_closing_does_not_wait_for_a_rank_that_never_comes(worlds):
    assert max(worlds.run(2, closed_alone)) < 10  # of 20 s for which an exchange may wait


def interrupted(group) -> list[str]:
    """Ctrl-C on rank 0 while it waits at the landing for rank 1, which has not launched yet."""
    rank, said = dist.get_rank(group), []
    net, optimizer, handle = start(group, delay=2, timeout=20.0)
    main, old = threading.get_ident(), signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, partial(signal.pthread_kill, main, signal.SIGINT))
    if rank == 0:
        timer.start()
    else:
        time.sleep(2)
    try:
        take_steps(net, optimizer, rank, range(8))
    except (KeyboardInterrupt, oktopk.ExchangeError) as error:
        said.append(f"{type(error).__name__} {error}")
    finally:
        signal.signal(signal.SIGINT, old)
    handle.close()
    return [*said, f"{threads_of_rounds()} threads"]


def test_an_interrupt_at_the_landing_is_told_to_the_other_ranks(worlds):
    first, second = worlds.run(2, interrupted)
    assert first[0].startswith("KeyboardInterrupt")
    assert "rank 0 failed in step 0: KeyboardInterrupt" in second[0]
    assert second[1] == "0 threads"


def start_badly(group, more: dict) -> str:
    try:
        start(group, timeout=20.0, **(more if dist.get_rank(group) == 1 else {}))
    except (ValueError, oktopk.ExchangeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"delay": 2}, "delay is 0 on ranks 0, 2 but 2 on rank 1"),
        ({"delay": 2, "mixing": 0.5}, "mixing is 1.0 on ranks 0, 2 but 0.5 on rank 1"),
        ({"fragments": 2}, "fragments is 1 on ranks 0, 2 but 2 on rank 1"),
    ],
)
def test_ranks_with_other_settings_all_raise(worlds, more, said):
    for text in worlds.run(3, start_badly, more):
        assert "the ranks disagree: " in text and said in text


def other_delay(comm) -> str:
    net, optimizer, handle = start(comm, delay=2 - comm.rank)
    try:
        take_steps(net, optimizer, comm.rank, range(8))
    except ValueError as error:
        return str(error)
    finally:
        handle.close()
    return "no error"


def test_without_a_store_the_first_exchange_compares_the_delay():
    for text in simulate(2, other_delay):
        assert "delay is 2 on rank 0 but 1 on rank 1" in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"delay": -1}, "delay must be 0 or more, got -1"),
        ({"delay": 4}, "delay must be less than every=4, got 4"),
        ({"delay": 1.5}, "delay must be a whole number, got 1.5"),
        ({"mixing": 0.5}, "mixing=0.5 has no effect with delay=0"),
        ({"mixing": 1.5, "delay": 1}, r"mixing must be in \[0, 1\], got 1.5"),
    ],
)
def test_misuse_is_named(more, said):
    with pytest.raises((TypeError, ValueError), match=said):
        start(None, **more)
