# SPDX-License-Identifier: Apache-2.0
"""The state dict of a handle: what is refused, by name, before anything of it is used."""

from __future__ import annotations

import copy
import json
import random

import pytest
import torch

from oktopk import Reducer
from oktopk.errors import StateError
from oktopk.exchange import saved_state

SHAPES = {"a": (4, 3), "b": (5,)}
THRESHOLDS = {
    "step": 3,
    "local": [0.5, 4.0],
    "result": [0.25, 2.0],
    "bounds": [0, 8, 17],
    "uneven": False,
    "single_owner": False,
}
METADATA = {
    "format": saved_state.FORMAT,
    "method": "oktopk",
    "world_size": 2,
    "rank": 0,
    "frozen": ["c"],
    "layout": [["b"], ["a"]],
    "settled_layout": [],
    "engine": {
        "step": 7,
        "skipped": 1,
        "numels": [5, 12],
        "quotas": [1, 2],
        "group_states": [THRESHOLDS],
        "model_state": THRESHOLDS | {"local": None, "result": None, "bounds": None},
    },
    "residual_scaling": {"rates": {"a": 0.1}, "peaks": {"a": 0.2}, "scale": None},
}


def a_state(**changes) -> dict:
    return {
        "residuals": {name: torch.ones(shape) for name, shape in SHAPES.items()},
        "arrived": {"a": torch.zeros(4, 3, dtype=torch.int32)},
        "metadata": json.dumps(METADATA | changes),
    }


def load(state, rank=0, world_size=2, method="oktopk", names="ab", frozen="c"):
    parameters = {name: torch.zeros(SHAPES.get(name, (2,))) for name in names}
    return saved_state.load(
        state,
        rank=rank,
        world_size=world_size,
        method=method,
        parameters=parameters,
        frozen=list(frozen),
    )


def changed(**changes) -> dict:
    """A state with changed parts, given by path: engine__step=..."""
    state, metadata = a_state(), copy.deepcopy(METADATA)
    for path, value in changes.items():
        *way, last = path.split("__")
        at = metadata
        for key in way:
            at = at[key]
        at[last] = value
    return state | {"metadata": json.dumps(metadata)}


def test_states_of_different_steps_are_not_put_together():
    later = changed(rank=1, engine__step=8)
    with pytest.raises(StateError, match="rank 0 is of step 7, that of rank 1 of step 8"):
        load([a_state(), later])


def test_a_good_state_is_read():
    saved = load(a_state())
    assert saved.metadata.engine.step == 7 and saved.residuals["a"].shape == (4, 3)


def test_a_rank_refuses_the_residuals_of_another_rank():
    with pytest.raises(StateError, match="rank 1: the state was saved by rank 0") as told:
        load(a_state(), rank=1)
    assert "handle.gathered" in str(told.value)


@pytest.mark.parametrize("form", [list, lambda states: {"ranks": states}], ids=["list", "gathered"])
def test_states_of_all_ranks_give_each_its_own(form):
    states = form([a_state(rank=0), a_state(rank=1)])
    assert [load(states, rank=rank).metadata.rank for rank in (0, 1)] == [0, 1]


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_world_size_keeps_the_sum_of_residuals(world_size):
    states = [a_state(rank=0), a_state(rank=1)]
    parts = [load(states, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert torch.equal(sum(part.residuals["b"] for part in parts), torch.full((5,), 2.0))


def test_frozen_then_or_now_is_no_other_model():
    thawed = load(a_state(), names="abc", frozen="")
    assert not thawed.residuals["c"].any() and thawed.metadata.layout == []
    assert thawed.metadata.engine.step == 7
    froze = load(a_state(), names="a", frozen="bc")
    assert set(froze.residuals) == {"a"}


def test_names_of_torch_compile_are_the_names_without_it():
    state = a_state()
    state["residuals"] = {f"_orig_mod.{name}": x for name, x in state["residuals"].items()}
    assert set(load(state).residuals) == {"a", "b"}


WRONG = {
    "no dict": (5, "not a state of a handle"),
    "format of the past": (changed(format=0), "has format 0 and this version of oktopk reads"),
    "no format": (a_state() | {"metadata": "{}"}, "has format None"),
    "metadata of another type": (a_state() | {"metadata": 3}, "'metadata' must be text, got a int"),
    "metadata that are no JSON": (
        a_state() | {"metadata": "{"},
        "'metadata' of the state cannot be read",
    ),
    "deep JSON": (a_state() | {"metadata": "[" * 10**5}, "'metadata' of the state cannot be read"),
    "a type": (changed(engine__step="7"), r"cannot be read: Expected `int`, got `str` .*engine"),
    "a huge number": (changed(engine__step=10**400), "cannot be read"),
    "a negative number": (changed(engine__quotas=[-1]), "cannot be read"),
    "more skipped than taken": (changed(engine__skipped=8), "7 steps, 8 of them skipped"),
    "bounds": (
        changed(engine__group_states=[THRESHOLDS | {"bounds": [0, 9]}]),
        "the region bounds",
    ),
    "a NaN threshold": (
        changed(engine__group_states=[THRESHOLDS | {"local": [float("nan"), 4.0]}]),
        "",
    ),
    "a rate": (changed(residual_scaling__rates={"a": -1.0}), "a learning rate or loss scale"),
    "a layout": (changed(layout=[["a"]]), "do not hold each of its parameters once"),
    "sizes": (changed(engine__numels=[1, 2]), r"buckets in the state have \[5, 12\] entries"),
    "residuals of another type": (a_state() | {"residuals": [1]}, "must be tensors by name"),
    "a residual of another type": (a_state() | {"residuals": {"a": 1, "b": 2}}, "has a int as 'a'"),
    "arrivals of another type": (
        a_state() | {"arrived": {"a": torch.zeros(4, 3)}},
        "'arrived' has a tensor of torch.float32, .* as 'a'",
    ),
}


@pytest.mark.parametrize(("state", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(state, message):
    with pytest.raises(StateError, match=f"rank 0: .*{message}"):
        load(state)


def test_shapes_are_compared_not_broadcast():
    for shape in ((4, 1), (1,), (12,)):
        state = a_state()
        state["residuals"]["a"] = torch.ones(shape)
        with pytest.raises(StateError):
            load(state)


def test_a_nan_in_a_residual_is_not_taken_over():
    state = a_state()
    state["residuals"]["b"][2] = float("nan")
    with pytest.raises(StateError, match="the residual of 'b' has a NaN or Inf"):
        load(state)


ODD = [None, True, -1, 0.5, 10**400, "x", [], [1, "a"], {}, {"a": None}, torch.zeros(2)]


def test_odd_states_are_one_kind_of_error():
    """1,000 changes at random places: read, or refused by StateError."""
    draw = random.Random(1)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(1000):
        metadata, state = copy.deepcopy(METADATA), a_state()
        at, key = metadata, draw.choice(list(metadata))
        while isinstance(at[key], dict) and at[key] and draw.random() < 0.8:
            at, key = at[key], draw.choice(list(at[key]))
        value = draw.choice(ODD)
        if draw.random() < 0.2:
            del at[key]
        elif not isinstance(value, torch.Tensor):
            at[key] = value
        state["metadata"] = json.dumps(metadata)
        if draw.random() < 0.3:
            state[draw.choice(list(state))] = value
        try:
            load(state)
            outcomes["read"] += 1
        except StateError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0


@pytest.mark.parametrize("old_size", [1, 2, 3, 8])
@pytest.mark.parametrize("new_size", [1, 2, 3, 5, 8])
def test_every_saved_state_is_taken_over_by_one_rank(old_size, new_size):
    saved = list(range(old_size))
    taken = [saved_state.taken_over(saved, rank, new_size) for rank in range(new_size)]
    assert sorted(state for part in taken for state in part) == saved
    assert max(map(len, taken)) - min(map(len, taken)) <= 1
    if old_size == new_size:
        assert taken == [[rank] for rank in range(new_size)]


@pytest.mark.parametrize("version", [None, 1, 99, "2"])
def test_a_reducers_state_of_another_format_says_what_to_do(version):
    reducer = Reducer(10)
    state = reducer.state_dict()
    assert state["format"] == saved_state.FORMAT
    with pytest.raises(StateError, match="resume with the version that saved it"):
        reducer.load_state_dict(state | {"format": version})
    reducer.load_state_dict(state)
