# SPDX-License-Identifier: Apache-2.0
"""Local steps: which calls count as a step, in what order a step does its work, what it says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import oktopk
from oktopk import simulate
from oktopk.errors import StateError
from rounds import changes_of, fragments_of, same, same_state, weights_of

# Which calls count as a step.


class Parent(torch.optim.SGD):
    """Has had an instance of its own, so torch runs hooks in its `step` too."""


class Calling(Parent):
    """The `step` of a subclass calls that of its parent."""

    fails = ""

    def step(self, closure=None):
        if self.fails == "before":
            raise MemoryError
        loss = super().step(closure)
        if self.fails == "after":
            raise MemoryError
        return loss


class Replacing(Parent):
    """The `step` of a subclass does all by itself."""

    fails = ""

    def step(self, closure=None):
        if self.fails:
            raise MemoryError


class Retrying(Parent):
    """The `step` of a subclass catches what that of its parent raises."""

    fails = ""

    def step(self, closure=None):
        try:
            super().step(self._fail)
        except MemoryError:
            super().step(closure)

    def _fail(self):
        if self.fails:
            raise MemoryError


def tiny(kind=torch.optim.SGD, model=None, **more):
    """A model whose gradients are set once and differ between ranks, its optimizer, the handle."""
    torch.manual_seed(more["comm"].rank if "comm" in more else 0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) if model is None else model
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer = kind(model.parameters(), lr=0.1)
    return model, optimizer, oktopk.local_steps(model, optimizer, verbose=False, **more)


@pytest.mark.parametrize("fails", ["before", "after"])
@pytest.mark.parametrize("kind", [Calling, Replacing, Retrying])
def test_a_step_that_raised_does_not_change_how_the_next_ones_count(kind, fails):
    Parent([nn.Parameter(torch.ones(1))], lr=0.1)
    _, optimizer, handle = tiny(kind, every=100)
    counts = []
    for number in range(6):
        optimizer.fails = fails if number in (1, 3) else ""
        try:
            optimizer.step()
        except MemoryError:
            assert kind is not Retrying
        counts.append(handle.local_steps)
    handle.close()
    assert counts == ([1, 2, 3, 4, 5, 6] if kind is Retrying else [1, 1, 2, 2, 3, 4])


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("kind", [torch.optim.SGD, Calling])
def test_a_compiled_step_counts_once_and_the_exchange_is_not_traced(kind):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    Parent([nn.Parameter(torch.ones(1))], lr=0.1)
    _, optimizer, handle = tiny(kind, every=2)
    step = torch.compile(optimizer.step, backend=backend)
    try:
        for _ in range(4):
            step()
        assert handle.step == 2 and handle.local_steps == 0
        assert len(graphs) == 1, "the update of the weights alone"
    finally:
        torch._dynamo.reset()
        handle.close()


# In what order a step does its work.

ORDERS = [
    {"every": 4},
    {"every": 4, "delay": 2},
    {"every": 4, "fragments": 2},
    {"every": 4, "fragments": 2, "delay": 2},
    {"every": 4, "fragments": 4, "delay": 1},
    {"every": 3, "fragments": 3, "delay": 2},
]


def saved_in_callbacks(comm, options: dict, inf_at: int) -> list[bool]:
    """For each callback: whether the state that it saved is that after the step, and after all
    else that it did."""
    saved, equal = [], []
    more = options | {"on_step": lambda _: saved.append(handle.state_dict())}
    model, optimizer, handle = tiny(comm=comm, **more)
    for step in range(14):
        if step == inf_at and comm.rank == 1:
            with torch.no_grad():
                model[1].bias[0] = float("inf")  # which equals itself
        optimizer.step()
        after = handle.state_dict()
        equal += [same_state(state, after) for state in saved]
        saved.clear()
    handle.exchange()
    equal += [same_state(state, handle.state_dict()) for state in saved]
    skipped = handle.skipped_steps
    handle.close()
    assert (skipped > 0) == (inf_at >= 0)
    return equal


@pytest.mark.parametrize("inf_at", [-1, 5, 6])
@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_a_callback_sees_the_state_after_all_that_the_step_does(options, inf_at):
    """All fragments have landed, were launched and rolled back: a state that is saved there is
    bit-exact."""
    for equal in simulate(2, lambda comm: saved_in_callbacks(comm, options, inf_at)):
        assert len(equal) >= 4 and all(equal)


@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_a_handle_may_be_closed_by_a_callback(options):
    _, optimizer, handle = tiny(on_step=lambda _: handle.close(), **options)
    for _ in range(9):
        optimizer.step()
    assert handle.closed and handle.step >= 1


# What is said.


def nan_in_both_fragments(comm) -> tuple[int, int]:
    """The weight of the first layer is one fragment, the rest is the other."""
    model, optimizer, handle = tiny(comm=comm, every=2, fragments=2, on_step=fail_in_the_last)
    for parameter in (model[0].bias, model[0].weight, None, None):
        optimizer.step()
        if parameter is not None and comm.rank == 1:
            with torch.no_grad():
                parameter.fill_(float("nan"))
    counts = handle.step, handle.skipped_steps
    handle.close()
    return counts


def fail_in_the_last(stats) -> None:
    if stats.step == 3:
        raise KeyError


def test_messages_number_the_exchanges_of_all_fragments(caplog):
    assert simulate(2, nan_in_both_fragments) == [(4, 2)] * 2
    said = [record.getMessage() for record in caplog.records]
    skipped = "a weight change had a NaN or Inf on some rank; no rank applied it"
    named = "the weights of this rank are not finite in"
    expected = [
        f"exchange 1: {named} 0.bias; they",
        f"exchange 1: {skipped} (1 exchange skipped so far)",
        f"exchange 2: {named} 0.weight; they",
        f"exchange 2: {skipped} (2 exchanges skipped so far)",
        "exchange 3: on_step failed",
    ]
    of_rank_1 = [line.removeprefix("rank 1, ") for line in said if line.startswith("rank 1, ")]
    assert len(of_rank_1) == 5
    assert all(map(str.startswith, of_rank_1, expected)), of_rank_1


# States that do not belong together.


def torn(comm, options: dict) -> str:
    """Rank 1 has saved one optimizer step later than rank 0, in the same round."""
    _, optimizer, handle = tiny(comm=comm, **options)
    for _ in range(5 + comm.rank):
        optimizer.step()
    state = handle.state_dict()
    for _ in range(1 - comm.rank):
        optimizer.step()
    handle.close()
    _, optimizer, handle = tiny(comm=comm, **options)
    handle.load_state_dict(state)
    try:
        for _ in range(3):
            optimizer.step()
    except ValueError as error:
        return str(error)
    return f"no error at local step {handle.local_steps}"


@pytest.mark.parametrize("options", [{"every": 4}, {"every": 8, "fragments": 2}], ids=str)
def test_the_first_exchange_compares_where_the_states_of_a_round_were_saved(options):
    for said in simulate(2, lambda comm: torn(comm, options)):
        assert "the ranks disagree: local steps as loaded is " in said


def load_badly(group, folder: str, wrong: str) -> list[str]:
    """Save, let the file of rank 1 be wrong, and load: before the first step, and after some."""
    rank, said = dist.get_rank(group), []
    _, optimizer, handle = tiny(group=group, every=4, timeout=20.0)
    for step in range(6):
        optimizer.step()
        if step == (5 if wrong == "later" and rank == 1 else 4):
            handle.save(folder)
    if wrong == "content" and rank == 1:
        torch.save({"weights": {}}, f"{folder}/oktopk-1-of-2.step-1-1.pt")
    dist.barrier(group)
    handle.close()
    _, optimizer, handle = tiny(group=group, every=4, timeout=20.0)
    for _ in range(2):
        try:
            handle.load(folder)
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
        for _ in range(5):
            optimizer.step()
    assert handle.step == 2
    dist.barrier(group)
    handle.close()
    return said


def test_files_of_different_steps_are_refused_by_all_ranks(worlds, tmp_path):
    expected = "their state is of step 1-1 on rank 0 but of step 1-2 on rank 1"
    for said in worlds.run(2, load_badly, str(tmp_path), "later"):
        assert len(said) == 2 and all(text.startswith("FileError: ") for text in said)
        assert all("no step whose state all ranks have" in text for text in said)
        assert all(expected in text for text in said)


def test_a_file_of_wrong_content_on_one_rank_is_an_error_on_all(worlds, tmp_path):
    ranks = worlds.run(2, load_badly, str(tmp_path), "content")
    for said, begin in zip(ranks, ("FileError: ", "StateError: rank 1: not a state"), strict=True):
        assert len(said) == 2 and all(text.startswith(begin) for text in said)
        assert all("local step 1 on rank 0 but refused on rank 1" in text for text in said)


# Parameters of several dtypes.


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())


def saved_mixed(comm, steps: int) -> dict:
    _, optimizer, handle = tiny(comm=comm, model=mixed(), every=4, density=0.2)
    for _ in range(steps):
        optimizer.step()
    state = handle.state_dict()
    handle.close()
    return state


def resumed_mixed(comm, states: list[dict]) -> tuple:
    model, optimizer, handle = tiny(comm=comm, model=mixed(), every=4, density=0.2)
    handle.load_state_dict(states)
    taken_over = handle.state_dict()
    for _ in range(5):
        optimizer.step()
    handle.exchange()
    weights = weights_of(model)
    dtypes = {residual.dtype for residual in handle.residuals.values()}
    handle.close()
    return taken_over, weights, dtypes


@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("steps", [0, 2, 4, 6])
def test_fewer_ranks_take_over_a_model_of_several_dtypes(P, steps):
    """The sum over ranks of what was not exchanged stays what it was, to the parameter's bits."""
    states = simulate(4, lambda comm: saved_mixed(comm, steps))
    ranks = simulate(P, lambda comm: resumed_mixed(comm, states))
    assert all(same(weights, ranks[0][1]) for _, weights, _ in ranks)
    assert all(dtypes == {torch.float64} for *_, dtypes in ranks)
    for name, weights in states[0]["weights"].items():
        before = sum(changes_of(state)[name] for state in states)
        after = sum(changes_of(taken_over)[name] for taken_over, *_ in ranks)
        torch.testing.assert_close(after, before, rtol=0, atol=8 * torch.finfo(weights.dtype).eps)


# A skipped exchange in flight, and another number of ranks.


def skipped_in_flight(comm) -> dict:
    """The first fragment is in flight, and so is the second, which was not finite on rank 1."""
    model, optimizer, handle = tiny(comm=comm, every=4, fragments=2, delay=3, density=0.5)
    for step in range(4):
        if step == 3 and comm.rank == 1:
            with torch.no_grad():
                model[1].bias[0] = float("nan")
        optimizer.step()
    state = handle.state_dict()
    handle.close()
    return state


def loaded(comm, states) -> dict:
    _, _, handle = tiny(comm=comm, every=4, fragments=2, delay=3, density=0.5)
    handle.load_state_dict(states)
    state = handle.state_dict()
    handle.close()
    return state


@pytest.mark.parametrize("P", [1, 2, 5])
def test_a_skipped_exchange_in_flight_rolls_all_fragments_back_on_other_ranks(P):
    states = simulate(4, skipped_in_flight)
    assert [bool(part["launched"]) for part in fragments_of(states[0])] == [True, True]
    ranks = simulate(P, lambda comm: loaded(comm, states))
    for number in range(2):
        before = [fragments_of(state)[number] for state in states]
        after = [fragments_of(state)[number] for state in ranks]
        for part in after:
            assert not part["launched"] and same(part["weights"], before[0]["anchor"])
        for name in before[0]["anchor"]:
            total = sum(part["residuals"][name] for part in before)
            torch.testing.assert_close(sum(part["residuals"][name] for part in after), total)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("state", [[], {"ranks": []}], ids=str)
def test_an_empty_list_of_states_is_refused(state, fragments):
    _, _, handle = tiny(every=4, fragments=fragments)
    with pytest.raises(StateError, match="rank 0: the list of states is empty"):
        handle.load_state_dict(state)
    handle.close()


def test_a_state_of_another_method_says_which_to_call_local_steps_with():
    _, _, handle = tiny(every=4)
    state = handle.state_dict()
    handle.close()
    _, _, handle = tiny(every=4, method="oktopk")
    said = "with method='topkdsa' and this is 'oktopk': call local_steps .* method='auto' stands"
    with pytest.raises(StateError, match=f"{said} for 'topkdsa'"):
        handle.load_state_dict(state)
    handle.close()


def test_a_state_of_longer_rounds_says_that_the_next_exchange_is_in_one_step(capfd):
    _, optimizer, handle = tiny(every=8)
    for _ in range(6):
        optimizer.step()
    state = handle.state_dict()
    handle.close()
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    handle = oktopk.local_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=4)
    handle.load_state_dict(state)
    handle.close()
    out = capfd.readouterr()
    assert "the next one is in 1 optimizer step\n" in out.out + out.err


# Parameters that cannot be exchanged, or are not.


def add_layer(model, optimizer) -> None:
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": list(model[2].parameters())})


def replace_weight(model, optimizer) -> None:
    model[1].weight = nn.Parameter(torch.ones(2, 4))


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("change", "names"),
    [(add_layer, r"\['2.weight', '2.bias'\]"), (replace_weight, r"\['1.weight'\]")],
)
def test_parameters_that_were_added_or_replaced_later_are_named(change, names, delay):
    model, optimizer, handle = tiny(every=2, delay=delay)
    optimizer.step()
    change(model, optimizer)
    with pytest.raises(ValueError, match=f"exchange 0: {names} are trained and not exchanged"):
        optimizer.step()
    handle.close()


def test_parameters_without_memory_of_their_own_are_named():
    expanded = nn.ParameterDict({"scale": nn.Parameter(torch.ones(1).expand(3))})
    lazy = nn.Sequential(nn.LazyLinear(2))
    for model, said in (
        (expanded, "parameter 'scale' is expanded"),
        (lazy, "parameter '0.weight' has no shape yet"),
    ):
        with pytest.raises(TypeError, match=said):
            oktopk.local_steps(model, torch.optim.SGD(model.parameters(), lr=0.1))


# A rank that takes fewer steps.


def fewer_steps(group) -> tuple[str, int]:
    rank, said = dist.get_rank(group), ""
    _, optimizer, handle = tiny(group=group, every=4, timeout=3.0)
    try:
        for _ in range(8 if rank else 6):
            optimizer.step()
    except oktopk.ExchangeError as error:
        said = str(error)
    step = handle._connection.failure_detector.step
    dist.barrier(group)
    handle.close()
    return said, step


def test_a_rank_that_waits_says_that_another_may_have_taken_fewer_steps(worlds):
    (_, here), (said, there) = worlds.run(2, fewer_steps)
    assert "called optimizer.step() less often (4 local steps here), or lost a connection" in said
    assert here == there == 1, "after an exchange the detector knows of it"
