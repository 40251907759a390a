# SPDX-License-Identifier: Apache-2.0
"""Local steps in fragments: parts of the model are exchanged one after the other."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.distributed as dist

import oktopk
from idioms import Net
from oktopk import simulate
from oktopk.adapters.local_state import divide
from oktopk.adapters.parameters import ParameterLayout
from rounds import changes_of, fragments_of, same, same_state, start, take_steps, weights_of

# How the model is divided.


def parts_of(numels: list[int], num: int) -> list[list[int]]:
    named = {str(i): torch.nn.Parameter(torch.zeros(numel)) for i, numel in enumerate(numels)}
    named["frozen"] = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    layouts = divide(ParameterLayout(named, oktopk.Policy()), num)
    assert all(layout.frozen == ["frozen"] for layout in layouts)
    return [[p.numel() for p in layout.parameters.values()] for layout in layouts]


def test_a_model_is_divided_in_its_order_into_parts_of_about_equal_size():
    assert parts_of([1, 2, 3, 4, 5, 6], 1) == [[1, 2, 3, 4, 5, 6]]
    assert parts_of([4, 4, 4, 4], 2) == [[4, 4], [4, 4]]
    assert parts_of([9, 1, 1, 1, 9], 3) == [[9], [1, 1, 1], [9]]
    assert parts_of([100, 1, 1], 3) == [[100], [1], [1]]
    assert parts_of([1, 1, 100], 3) == [[1], [1], [100]]
    assert parts_of([1, 1, 100, 2, 2], 2) == [[1, 1, 100], [2, 2]]
    with pytest.raises(ValueError, match=r"number of trained parameters, 2, got 3"):
        parts_of([1, 1], 3)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"fragments": 0}, "fragments must be 1 or more, got 0"),
        ({"fragments": 5}, "fragments must be at most every=4, got 5"),
        ({"fragments": 13, "every": 20}, "number of trained parameters, 12, got 13"),
    ],
)
def test_misuse_is_named(more, said):
    with pytest.raises(ValueError, match=said):
        start(None, **more)


# The algorithm, against a reference of a few lines.


def averaging(P: int, steps: int, every: int, num: int, delay: int) -> list[list[dict]]:
    """After each step the weights of all ranks: the mean replaces those of a fragment in turn."""
    torch.manual_seed(0)
    outer = Net()
    layouts = divide(ParameterLayout(dict(outer.named_parameters()), oktopk.Policy()), num)
    nets = [copy.deepcopy(outer) for _ in range(P)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    launched, seen = [None] * num, []
    for step in range(1, steps + 1):
        for rank in range(P):
            take_steps(nets[rank], optimizers[rank], rank, range(step - 1, step))
        for i, layout in enumerate(layouts):
            since = step - (i + 1) * every // num  # since its first exchange
            if since >= 0 and since % every == 0:
                launched[i] = [weights_of(net) for net in nets]
                for name, p in layout.parameters.items():
                    theirs = [net.get_parameter(name) for net in nets]
                    p.detach().sub_(sum(p.detach() - each.detach() for each in theirs) / P)
            if since >= 0 and since % every == delay and launched[i]:
                for net, before in zip(nets, launched[i], strict=True):
                    for name, p in layout.parameters.items():
                        mine = net.get_parameter(name).detach()
                        mine.copy_(p.detach() + (mine - before[name]))
        seen.append([weights_of(net) for net in nets])
    return seen


def by_fragments(comm, steps: int, **more) -> list[dict]:
    how = {"density": 1.0, "average": "all", "outer_lr": 1.0, "outer_momentum": 0.0} | more
    net, optimizer, handle = start(comm, **how)
    seen = []
    for step in range(steps):
        take_steps(net, optimizer, comm.rank, range(step, step + 1))
        seen.append(weights_of(net))
    handle.close()
    return seen


@pytest.mark.parametrize(("num", "every", "delay"), [(1, 4, 0), (2, 4, 0), (3, 7, 0), (3, 7, 4)])
def test_density_one_averages_a_fragment_in_turn(num, every, delay):
    (reference,) = simulate(1, lambda _: averaging(3, 20, every, num, delay))
    more = {"every": every, "fragments": num, "delay": delay}
    ranks = simulate(3, lambda comm: by_fragments(comm, 20, **more))
    for weights, expected in zip(zip(*ranks, strict=True), reference, strict=True):
        assert all(map(same, weights, expected))


def seen_by_the_user(comm) -> tuple:
    exchanges = []
    net, optimizer, handle = start(comm, every=6, fragments=3, delay=1)
    handle.on_step = exchanges.append
    counts = []
    for step in range(13):
        take_steps(net, optimizer, comm.rank, range(step, step + 1))
        counts.append((handle.step, handle.local_steps))
    before = handle.comm.ledger.total().sent
    residuals, dense = set(handle.residuals), handle.dense_parameters
    last = handle.exchange()
    sent = handle.traffic["replicate"].sent - before
    assert handle.stats == exchanges[-1] == last and on_the_wire(handle, exchanges, sent)
    counts.append((handle.step, handle.local_steps))
    take_steps(net, optimizer, comm.rank, range(13, 16))
    counts.append((handle.step, handle.local_steps))
    handle.close()
    return counts, [(s.step, s.numel) for s in exchanges], residuals, dense, weights_of(net)


def on_the_wire(handle, exchanges, sent: int) -> bool:
    """The bytes of the three exchanges that were asked for; one more landed before them."""
    return sent == sum(stats.bytes_sent for stats in exchanges[-3:])


def test_what_a_handle_says_is_of_all_fragments():
    """Fragments are exchanged after 2, 4, 6, 8 ... steps, and applied one step later."""
    net = Net()
    numels = [p.numel() for p in net.parameters()]
    for counts, exchanges, residuals, dense, _ in simulate(2, seen_by_the_user):
        assert [step for step, _ in counts[:13]] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
        assert [steps for _, steps in counts[:13]] == [1, *(0, 1) * 6]
        # all at once, and then in turn again
        assert counts[13:] == [(9, 0), (10, 0 + 1)]
        assert [step for step, _ in exchanges] == list(range(10))
        sizes = [numel for _, numel in exchanges]
        assert sizes == sizes[:3] * 3 + sizes[:1] and sum(sizes[:3]) == sum(numels)
        assert max(sizes) < 2 * min(sizes)
        assert residuals == {name for name, _ in net.named_parameters()}
        layout = ParameterLayout(dict(net.named_parameters()), oktopk.Policy())
        assert dense == layout.dense and "head.bias" in dense and "middle.weight" not in dense


# With real ranks: agreement, and stop and resume.


def agreed(group, more: dict) -> list[tuple]:
    rank, seen = dist.get_rank(group), []
    net, optimizer, handle = start(group, fragments=2, **more)
    for step in range(9):
        take_steps(net, optimizer, rank, range(step, step + 1))
        anchors = [part["anchor"] for part in fragments_of(handle.state_dict())]
        seen.append(({name: x for part in anchors for name, x in part.items()}, weights_of(net)))
    handle.exchange()
    seen.append((seen[-1][0], weights_of(net)))
    dist.barrier(group)
    handle.close()
    return seen


@pytest.mark.parametrize("delay", [0, 3])
def test_anchors_are_equal_after_every_exchange_of_a_fragment(worlds, delay):
    ranks = worlds.run(3, agreed, {"delay": delay})
    before, changes = None, []
    for number, states in enumerate(zip(*ranks, strict=True)):
        anchor, weights = states[0]
        assert all(same(theirs, anchor) for theirs, _ in states)
        all_equal = all(same(theirs, weights) for _, theirs in states)
        assert all_equal == (number == 9), "all fragments only where an exchange was asked for"
        if before is not None:
            changed = [name for name in anchor if not torch.equal(anchor[name], before[name])]
            changes.append(len(changed))
        before = anchor
    # steps 2 to 9: the anchor of one fragment, then of the other
    assert changes[0] > 0 and changes[2] > 0 and changes[0] + changes[2] == 12
    assert changes == [changes[0], 0, changes[2], 0] * 2 + [0]


def resumed(comm, more: dict) -> list[bool]:
    """Whether a run that is resumed at each step of two rounds has the bits of one that never
    stopped, at its end."""
    net, optimizer, handle = start(comm, **more)
    saved, steps = [], 13
    for step in range(steps):
        if step < 10:
            saved.append(copy.deepcopy((handle.state_dict(), optimizer.state_dict())))
        take_steps(net, optimizer, comm.rank, range(step, step + 1))
    straight = handle.state_dict()
    handle.close()
    equal = []
    for step, (state, moments) in enumerate(saved):
        net, optimizer, handle = start(comm, seed=1, **more)
        optimizer.load_state_dict(moments)
        handle.load_state_dict(state)
        take_steps(net, optimizer, comm.rank, range(step, steps))
        equal.append(same_state(straight, handle.state_dict()))
        handle.close()
    return equal


@pytest.mark.parametrize("more", [{}, {"delay": 1}, {"delay": 3, "dtype": torch.bfloat16}])
def test_a_resumed_run_has_the_same_bits_at_every_step_of_two_rounds(more):
    for equal in simulate(2, lambda comm: resumed(comm, {"fragments": 2, **more})):
        assert len(equal) == 10 and all(equal)


def by_files(group, folder: str, gathered: bool, states: dict | None) -> tuple:
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group, fragments=2, delay=3)
    if states is None and gathered:
        handle.load(folder)
    elif states is not None:
        handle.load_state_dict(states)
    else:
        take_steps(net, optimizer, rank, range(6))
        handle.save(folder)
    state, everyone = handle.state_dict(), handle.gathered_state_dict()
    dist.barrier(group)
    handle.close()
    return state, everyone


def unsent(states: list[dict]) -> dict[str, torch.Tensor]:
    """The sum over ranks of what was not exchanged, of all fragments."""
    each = [changes_of(part) for state in states for part in fragments_of(state)]
    names = {name for changes in each for name in changes}
    return {name: sum(changes[name] for changes in each if name in changes) for name in names}


def test_states_are_saved_gathered_and_taken_over_by_another_number_of_ranks(worlds, tmp_path):
    first = worlds.run(3, by_files, str(tmp_path), False, None)
    states = [state for state, _ in first]
    assert all(part["launched"] for state in states for part in fragments_of(state))
    assert all(len(everyone["ranks"]) == 3 for _, everyone in first)
    for again in (
        worlds.run(3, by_files, str(tmp_path), True, None),
        worlds.run(3, by_files, "", True, first[0][1]),
    ):
        assert all(map(same_state, states, (state for state, _ in again)))
    had = unsent(states)
    for ranks in (
        worlds.run(2, by_files, str(tmp_path), True, None),
        worlds.run(2, by_files, "", True, first[0][1]),
    ):
        have = unsent([state for state, _ in ranks])
        for name, total in had.items():
            torch.testing.assert_close(have[name], total)


def other_number(comm, state: dict, num: int) -> str:
    _, _, handle = start(comm, fragments=num)
    try:
        handle.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_state_of_another_number_of_fragments_is_refused():
    def saved(comm, num: int) -> dict:
        return start(comm, fragments=num)[2].state_dict()

    for there, here in ((1, 2), (2, 1), (3, 2)):
        (state,) = simulate(1, lambda comm, num=there: saved(comm, num))
        for asked in (state, [state], {"ranks": [state]}):
            args = asked, here
            (said,) = simulate(1, lambda comm, args=args: other_number(comm, *args))
            expected = f"rank 0: the state was saved with fragments={there} and this is"
            assert said.startswith(f"{expected} fragments={here}: ")


# What goes wrong in one fragment.


def nan_on_one_rank(group, delay: int, on_nonfinite: str) -> tuple:
    """A NaN on rank 1 before the second of 13 steps, in the fragment that is exchanged last."""
    rank, seen, told = dist.get_rank(group), [], []
    more = {"fragments": 2, "delay": delay, "on_nonfinite": on_nonfinite, "on_step": seen.append}
    net, optimizer, handle = start(group, **more)
    moments = copy.deepcopy(optimizer.state_dict())
    for step in range(13):
        if step == 1 and rank == 1:
            with torch.no_grad():
                net.head.weight[0, 0] = float("nan")
        had = handle.skipped_steps
        try:
            take_steps(net, optimizer, rank, range(step, step + 1))
        except oktopk.NonfiniteError as error:
            told.append((step, str(error)))
        if handle.skipped_steps > had:
            optimizer.load_state_dict(moments)  # Adam's moments are not finite either
    handle.exchange()
    dist.barrier(group)
    handle.close()
    return [stats.skipped for stats in seen], told, weights_of(net)


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
@pytest.mark.parametrize(("delay", "landing", "num"), [(0, 1, 1), (1, 2, 1), (3, 4, 2)])
def test_a_nan_rolls_all_fragments_back_and_is_gone(worlds, delay, landing, num, on_nonfinite):
    """With a delay of 3 both fragments are in flight when the first lands, and neither is
    finite."""
    ranks = worlds.run(3, nan_on_one_rank, delay, on_nonfinite)
    for rank, (skipped, told, weights) in enumerate(ranks):
        assert skipped[:num] == [True] * num and len(skipped) > 6 and not any(skipped[num:])
        assert same(weights, ranks[0][2])
        assert all(torch.isfinite(x).all() for x in weights.values())
        said = f"rank {rank}, exchange 0: a weight change had a NaN or Inf on some rank"
        assert told == ([(landing, said)] if on_nonfinite == "raise" else [])


def with_budgets(comm) -> tuple:
    net, optimizer, handle = start(comm, fragments=2, density="auto", exchange_share=0.3)
    take_steps(net, optimizer, comm.rank, range(16))
    shares = [driver.budget.options.share for driver in handle.drivers]
    chosen = [driver.engine.settings.density for driver in handle.drivers]
    handle.close()
    return shares, chosen, weights_of(net)


def test_every_fragment_has_a_budget_of_its_share(caplog):
    caplog.set_level(logging.WARNING)
    ranks = simulate(2, with_budgets)
    for shares, chosen, _ in ranks:
        assert shares == [0.15, 0.15] and chosen == ranks[0][1]
