# SPDX-License-Identifier: Apache-2.0
"""Weights that something else than the optimizer writes, after `local_steps` was called."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import oktopk
from idioms import Net, batch
from oktopk import simulate
from oktopk.adapters.local_notices import Notice
from optimizers import SAM
from rounds import same, same_state, start, take_steps, weights_of

SHAPES = {name: x.shape for name, x in Net().state_dict().items()}


def other_weights(seed: int = 7) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)  # simulated ranks share the default one
    return {name: 0.1 * torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def by_load_state_dict(net, weights) -> None:
    net.load_state_dict(weights)


def by_child(net, weights) -> None:
    """Every part of the model by itself, as backbone and head are loaded."""
    for name, child in net.named_children():
        prefix = f"{name}."
        own = {n.removeprefix(prefix): x for n, x in weights.items() if n.startswith(prefix)}
        child.load_state_dict(own)


def in_place(net, weights) -> None:
    with torch.no_grad():
        for name, x in net.state_dict().items():
            x.copy_(weights[name])


def by_assigning_data(net, weights) -> None:
    for name, p in net.named_parameters():
        p.data = weights[name].to(p.dtype, copy=True)


def through_data(net, weights) -> None:
    for name, p in net.named_parameters():
        p.data.copy_(weights[name])


WAYS = [by_load_state_dict, by_child, in_place, by_assigning_data]


def distance(net, weights) -> float:
    return max(float((p - weights[n]).abs().max()) for n, p in weights_of(net).items())


# Bytes.


def bytes_of_agreements(comm) -> list[int]:
    seen = []
    net, optimizer, _ = start(comm, on_step=seen.append)
    take_steps(net, optimizer, comm.rank, range(8))
    return [stats.stages["agreement"].sent for stats in seen if comm.size > 1]


@pytest.mark.parametrize("P", [1, 2, 5])
def test_each_exchange_tells_a_few_numbers_to_every_other_rank(P):
    each = 8 * len(Notice.__dataclass_fields__) * (P - 1)
    assert simulate(P, bytes_of_agreements) == [[each] * 2 * (P > 1)] * P


def bytes_with_a_load(comm) -> tuple:
    seen = []
    net, optimizer, _ = start(comm, on_step=seen.append)
    net.load_state_dict(other_weights())
    take_steps(net, optimizer, comm.rank, range(8))
    return [stats.stages["agreement"].sent for stats in seen], len(weights_of(net))


def test_comparing_what_was_written_costs_16_bytes_for_each_parameter_once():
    for sent, num in simulate(3, bytes_with_a_load):
        each = 8 * len(Notice.__dataclass_fields__) * 2
        assert sent == [each + 16 * num * 2, each]


# What is the same on all ranks is a new start.


def loaded(comm, write, at: int, options: dict) -> tuple:
    """How far the weights are from those that were written, after two more rounds in which the
    optimizer moves nothing: learning rate 0."""
    net, optimizer, handle = start(comm, **options)
    take_steps(net, optimizer, comm.rank, range(at))
    weights = other_weights()
    write(net, weights)
    before = distance(net, weights)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    take_steps(net, optimizer, comm.rank, range(at, at + 9))
    handle.exchange()
    after = distance(net, weights)
    unsent = max(float(r.abs().max()) for r in handle.residuals.values())
    handle.close()
    return before, after, unsent


PLACES = [0, 2, 4, 5, 11]
STREAMING = {"delay": 2, "mixing": 0.75, "fragments": 2}


@pytest.mark.parametrize("options", [{}, {"fragments": 3}, {"delay": 3}, STREAMING])
@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("write", [by_load_state_dict, by_child])
def test_loaded_weights_are_a_new_start(write, at, options):
    for before, after, unsent in simulate(2, lambda comm: loaded(comm, write, at, options)):
        assert (before, after, unsent) == (0, 0, 0)


@pytest.mark.parametrize("options", [{}, {"fragments": 3}, {"dtype": torch.float64}])
@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("write", [in_place, by_assigning_data])
def test_weights_written_in_other_ways_are_a_new_start_too(write, at, options):
    for before, after, unsent in simulate(2, lambda comm: loaded(comm, write, at, options)):
        assert (before, after, unsent) == (0, 0, 0)


@pytest.mark.parametrize("at", [0, 4, 8])
def test_writes_through_data_are_seen_between_an_exchange_and_the_next_step(at):
    for answer in simulate(2, lambda comm: loaded(comm, through_data, at, {})):
        assert answer == (0, 0, 0)


def steps_after(comm, write, more: dict) -> dict:
    """Weights of a run that loads at the start, or is started from what it would load."""
    net, optimizer, handle = start(comm, **more)
    if write is None:
        handle.close()
        comm.is_attached = False
        net.load_state_dict(other_weights())
        handle = oktopk.local_steps(
            net, optimizer, comm=comm, every=4, density=0.05, outer_momentum=0.5, outer_lr=0.7,
            check_every=2, **more,
        )  # fmt: skip
    else:
        write(net, other_weights())
    take_steps(net, optimizer, comm.rank, range(13))
    return weights_of(net)


@pytest.mark.parametrize("more", [{}, {"delay": 2, "fragments": 2}])
@pytest.mark.parametrize("write", WAYS)
def test_a_load_right_after_the_call_is_a_load_before_it_to_the_bit(write, more):
    late = simulate(2, lambda comm: steps_after(comm, write, more))
    early = simulate(2, lambda comm: steps_after(comm, None, more))
    assert all(same(a, b) for a, b in zip(late, early, strict=True))


def says(comm, verbose: bool) -> None:
    net, optimizer, _ = start(comm, verbose=verbose)
    net.load_state_dict(other_weights())
    take_steps(net, optimizer, comm.rank, range(12))


def test_it_is_said_once(capfd):
    simulate(2, lambda comm: says(comm, True))
    (line,) = [x for x in capfd.readouterr().err.splitlines() if "starting point" in x]
    assert line.startswith("oktopk: exchange 0: the weights that were written to inner.weight, ")
    assert " more, the same on all ranks, are the new starting point" in line
    simulate(2, lambda comm: says(comm, False))
    assert not capfd.readouterr().err


# What is not the same on all ranks.


def refused(comm, at: int, which: str, options: dict) -> str:
    net, optimizer, handle = start(comm, **options)
    take_steps(net, optimizer, comm.rank, range(at))
    if which == "other":
        weights = other_weights(5 + comm.rank)
        net.middle.load_state_dict({n: weights[f"middle.{n}"] for n in ("weight", "bias")})
    elif comm.rank == 1:
        net.load_state_dict(other_weights())
    try:
        take_steps(net, optimizer, comm.rank, range(at, at + 12))
    except ValueError as error:
        return str(error)
    finally:
        handle.close()
    return "no error"


@pytest.mark.parametrize("options", [{}, {"delay": 2, "fragments": 2}])
@pytest.mark.parametrize("at", [0, 4, 6])
def test_weights_that_one_rank_loads_are_an_error_on_all(at, options):
    for rank, said in enumerate(simulate(3, lambda comm: refused(comm, at, "alone", options))):
        assert said.startswith(f"rank {rank}: rank 1 loaded weights into ")
        assert "not the same on all ranks: load the same on each" in said


@pytest.mark.parametrize("at", [0, 6])
def test_weights_that_differ_are_an_error_that_names_them(at):
    for rank, said in enumerate(simulate(3, lambda comm: refused(comm, at, "other", {}))):
        start = f"rank {rank}: ranks 0, 1, 2 loaded weights into middle.weight, middle.bias after"
        assert said.startswith(start)


def with_projection(comm, undo: bool, options: dict) -> tuple:
    """Weights are clamped after every step, or changed and put back, as averages are evaluated."""
    net, optimizer, handle = start(comm, **options)
    for step in range(12):
        take_steps(net, optimizer, comm.rank, range(step, step + 1))
        kept = weights_of(net)
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.clamp_(-0.1, 0.1)
                if undo:
                    p.copy_(kept[name])
    state, num = handle.state_dict(), handle.step
    handle.close()
    return weights_of(net), state, num


@pytest.mark.parametrize("options", [{}, {"delay": 2}])
@pytest.mark.parametrize("undo", [False, True])
def test_writes_that_differ_and_were_not_loaded_are_moves_of_each_rank(undo, options, caplog):
    ranks = simulate(2, lambda comm: with_projection(comm, undo, options))
    assert all(step == 3 - bool(options) for *_, step in ranks)
    told = [r for r in caplog.records if "between two steps of the optimizer" in r.getMessage()]
    assert len(told) == 1, "once, by rank 0"
    assert told[0].levelno == logging.WARNING
    assert not any(state["written"] for _, state, _ in ranks)


def evaluating(comm, how: str, options: dict) -> dict:
    """Averages are swapped in and out after steps; `load` by `load_state_dict`, and on rank 1."""
    net, optimizer, handle = start(comm, **options)
    for step in range(14):
        take_steps(net, optimizer, comm.rank, range(step, step + 1))
        if how == "load" and step % 3 == comm.rank:
            own = copy.deepcopy(net.state_dict())
            net.load_state_dict(other_weights())
            if step > 6:
                assert handle.state_dict()["written"]
            net.load_state_dict(own)
    state = handle.state_dict()
    assert not state["loaded"]
    handle.close()
    return state


@pytest.mark.parametrize("options", [{}, {"delay": 2}])
def test_weights_that_were_put_back_change_nothing(options, caplog):
    swapped = simulate(2, lambda comm: evaluating(comm, "load", options))
    straight = simulate(2, lambda comm: evaluating(comm, "", options))
    assert all(same_state(a, b) for a, b in zip(swapped, straight, strict=True))
    assert not caplog.records


def resumed_in_another_order(comm) -> bool:
    net, optimizer, handle = start(comm)
    take_steps(net, optimizer, comm.rank, range(6))
    saved = copy.deepcopy([optimizer.state_dict(), handle.state_dict(), net.state_dict()])
    take_steps(net, optimizer, comm.rank, range(6, 9))
    straight = handle.state_dict()
    handle.close()
    comm.is_attached = False
    net, optimizer, handle = start(comm, seed=4)
    for part, state in zip((optimizer, handle, net), saved, strict=True):
        part.load_state_dict(state)
    take_steps(net, optimizer, comm.rank, range(6, 9))
    return same_state(straight, handle.state_dict())


def test_the_weights_of_a_state_may_be_loaded_once_more_after_it():
    assert all(simulate(2, resumed_in_another_order))


# Writes after a load are moves.


def swapped(net, comm) -> None:
    """Averages are copied in for an evaluation, and out."""
    own = weights_of(net)
    in_place(net, other_weights(comm.rank))
    in_place(net, own)


def swapped_by_load(net, comm) -> None:
    own = weights_of(net)
    net.load_state_dict(other_weights(comm.rank))
    net.load_state_dict(own)


def clamped(net, comm) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.clamp_(-0.2, 0.2)


def left_alone(net, comm) -> None:
    """The run that the others are compared with."""


def load_and_write(comm, write, at: int, when: str, options: dict) -> tuple:
    """A load after step `at`, and writes by hand after every step or once after the next one."""
    net, optimizer, handle = start(comm, **options)
    writes_at = range(20) if when == "always" else [at + 1]
    for step in range(at + 6):
        take_steps(net, optimizer, comm.rank, range(step, step + 1))
        if step == at:
            net.load_state_dict(other_weights())
        if step in writes_at:
            write(net, comm)
    handle.exchange()
    state, away = handle.state_dict(), distance(net, other_weights())
    handle.close()
    return state, away


DELAYS = pytest.mark.parametrize(
    "options", [{}, {"delay": 2}, {"delay": 2, "fragments": 2}], ids=str
)


@DELAYS
@pytest.mark.parametrize("when", ["once", "always"])
@pytest.mark.parametrize("at", [3, 5, 6])
@pytest.mark.parametrize("write", [swapped, swapped_by_load])
def test_swapping_weights_after_a_load_changes_nothing(write, at, when, options):
    """Wherever the load is in the round, and whether an exchange is in flight."""
    ranks = simulate(2, lambda comm: load_and_write(comm, write, at, when, options))
    straight = simulate(2, lambda comm: load_and_write(comm, left_alone, at, when, options))
    for (state, _), (expected, _) in zip(ranks, straight, strict=True):
        assert same_state(state, expected)


@DELAYS
@pytest.mark.parametrize("when", ["once", "always"])
@pytest.mark.parametrize("at", [3, 5, 6])
def test_clamping_after_a_load_is_a_move(at, when, options):
    for _, away in simulate(2, lambda comm: load_and_write(comm, clamped, at, when, options)):
        assert away < 0.3, "as far as 6 steps of 0.01 and the clamp take them"


def two_loads(comm, options: dict) -> float:
    net, optimizer, handle = start(comm, **options)
    for at, seed in ((5, 3), (1, 7)):
        take_steps(net, optimizer, comm.rank, range(at))
        net.load_state_dict(other_weights(seed))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    take_steps(net, optimizer, comm.rank, range(6))
    handle.exchange()
    away = distance(net, other_weights(7))
    handle.close()
    return away


@DELAYS
def test_another_load_is_another_start(options):
    assert simulate(2, lambda comm: two_loads(comm, options)) == [0, 0]


def by_sam(comm, load_at: int) -> float:
    torch.manual_seed(comm.rank)
    net = Net()
    optimizer = SAM(net.parameters(), lr=0.01)
    handle = oktopk.local_steps(net, optimizer, comm=comm, every=4, verbose=False)
    for step in range(12):
        x, y = batch(comm.rank, step)
        cross_entropy(net(x), y).backward()
        optimizer.first_step()
        cross_entropy(net(x), y).backward()
        optimizer.second_step()
        if step == load_at:
            net.load_state_dict(other_weights())
    away = distance(net, other_weights())
    handle.close()
    return away


@pytest.mark.parametrize("load_at", [3, 5])
def test_weights_are_loaded_between_steps_of_sam(load_at):
    assert all(away < 0.1 for away in simulate(2, lambda comm: by_sam(comm, load_at)))


def with_two_optimizers(comm) -> int:
    torch.manual_seed(0)
    net = Net()
    halves = list(net.parameters())[::2], list(net.parameters())[1::2]
    first, second = (torch.optim.SGD(half, lr=0.01) for half in halves)
    handle = oktopk.local_steps(net, first, comm=comm, every=4)
    for step in range(12):
        take_steps(net, second, comm.rank, range(step, step + 1))
        first.step()
    return handle.step


def test_another_optimizer_of_the_same_model_goes_on():
    assert simulate(2, with_two_optimizers) == [3, 3]


def nan_is_loaded(comm) -> tuple:
    net, optimizer, handle = start(comm)
    take_steps(net, optimizer, comm.rank, range(4))
    anchor = weights_of(net)
    net.load_state_dict({n: x * float("nan") for n, x in other_weights().items()})
    take_steps(net, optimizer, comm.rank, range(4, 8))
    return handle.skipped_steps, same(anchor, weights_of(net))


def test_a_nan_is_no_start():
    assert simulate(2, nan_is_loaded) == [(1, True)] * 2


def nan_after_a_load(comm, options: dict) -> tuple:
    """The round after a load is rolled back: to what was loaded, not to what was before."""
    net, optimizer, handle = start(comm, **options)
    take_steps(net, optimizer, comm.rank, range(5))
    weights = other_weights()
    net.load_state_dict(weights)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    take_steps(net, optimizer, comm.rank, range(5, 6))
    handle.on_step = lambda stats: optimizer.state.clear() if stats.skipped else None
    for p in net.parameters():
        p.grad = torch.full_like(p, float("nan")) if comm.rank else p.grad
    optimizer.step()
    take_steps(net, optimizer, comm.rank, range(7, 13))
    return handle.skipped_steps > 0, distance(net, weights)


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"delay": 2, "fragments": 2}])
def test_a_round_after_a_load_is_rolled_back_to_what_was_loaded(options):
    for skipped, away in simulate(2, lambda comm: nan_after_a_load(comm, options)):
        assert skipped and away == 0


# Stop and resume between a load and the next exchange.


def resumed_after_a_load(comm, options: dict, write) -> list[bool]:
    net, optimizer, handle = start(comm, **options)
    take_steps(net, optimizer, comm.rank, range(5))
    write(net, other_weights())
    saved = []
    for step in range(5, 13):
        state = io.BytesIO()
        torch.save([optimizer.state_dict(), handle.state_dict()], state)
        saved.append((step, state.getvalue()))
        take_steps(net, optimizer, comm.rank, range(step, step + 1))
    straight, equal = handle.state_dict(), []
    handle.close()
    for step, data in saved:
        comm.is_attached = False
        moments, state = torch.load(io.BytesIO(data), weights_only=True)
        net, optimizer, handle = start(comm, seed=3, **options)
        optimizer.load_state_dict(moments)
        net.load_state_dict(other_weights(9))  # as scripts do; the handle's state comes after it
        handle.load_state_dict(state)
        take_steps(net, optimizer, comm.rank, range(step, 13))
        again = handle.state_dict()
        equal.append(same_state(straight, again))
        handle.close()
    return equal


@pytest.mark.parametrize("write", [by_load_state_dict, in_place])
@pytest.mark.parametrize("options", [{}, {"delay": 2, "fragments": 2}])
def test_a_run_that_stops_after_a_load_resumes_with_the_same_bits(options, write):
    for equal in simulate(2, lambda comm: resumed_after_a_load(comm, options, write)):
        assert len(equal) == 8 and all(equal)


def state_after_a_load(comm, unequal: bool, options: dict) -> dict:
    net, optimizer, handle = start(comm, **options)
    take_steps(net, optimizer, comm.rank, range(5))
    net.load_state_dict(other_weights(comm.rank if unequal else 0))
    take_steps(net, optimizer, comm.rank, range(5, 6))
    return handle.state_dict()


def taken_over(comm, states: list[dict], options: dict) -> tuple:
    net, optimizer, handle = start(comm, seed=5, **options)
    handle.load_state_dict(copy.deepcopy(states))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    handle.exchange()
    return handle.state_dict(), weights_of(net)


@pytest.mark.parametrize("options", [{}, {"delay": 2}])
@pytest.mark.parametrize("P", [1, 3])
def test_another_number_of_ranks_starts_from_what_was_loaded(P, options):
    more = {"density": 1.0, "outer_momentum": 0.0, "outer_lr": 1.0, "average": "all", "decay": 1.0}
    more |= options
    states = simulate(2, lambda comm: state_after_a_load(comm, False, more))
    mean = sum(own["weights"][n] for own in states for n in ["head.weight"]) / 2
    for state, weights in simulate(P, lambda comm: taken_over(comm, states, more)):
        assert not state["written"]
        start = other_weights(0)["head.weight"]
        moved = (weights["head.weight"] - start) * P
        torch.testing.assert_close(moved, (mean - start) * 2, atol=1e-5, rtol=1e-4)


def test_another_number_of_ranks_cannot_start_from_different_weights():
    states = simulate(2, lambda comm: state_after_a_load(comm, True, {}))
    with pytest.raises(
        ValueError, match=r"weights were loaded into inner\.weight, .* not the same"
    ):
        simulate(3, lambda comm: taken_over(comm, states, {}))


# Copies of a model that is watched.


def test_copies_and_pickles_of_the_model_are_not_watched():
    net, _, handle = start(None)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert "oktopk" not in str(pickle.dumps(other).replace(b"idioms", b""))
        other.load_state_dict(other_weights())
        other.load_state_dict(other_weights())
        in_place(net, other_weights())
        state = handle.state_dict()
        assert state["written"] and not state["loaded"]
    handle.close()
    assert not any(module._load_state_dict_pre_hooks for module in net.modules())


# With real ranks.


def after_a_load(group, alone: bool) -> tuple:
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group)
    take_steps(net, optimizer, rank, range(6))
    said = ""
    if rank == 0 or not alone:
        net.load_state_dict(other_weights())
    for each in optimizer.param_groups:
        each["lr"] = 0.0
    try:
        take_steps(net, optimizer, rank, range(6, 12))
    except ValueError as error:
        said = str(error)
    away = distance(net, other_weights())
    dist.barrier(group)
    handle.close()
    return said, away


def test_over_a_process_group(worlds):
    assert worlds.run(3, after_a_load, False) == [("", 0.0)] * 3
    for rank, (said, _) in enumerate(worlds.run(3, after_a_load, True)):
        assert said.startswith(f"rank {rank}: rank 0 loaded weights into inner.weight, ")
