# SPDX-License-Identifier: Apache-2.0
"""Arguments and states of any type: taken, or refused by an error that names them."""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from oktopk import Reducer, attach
from oktopk.settings import Settings

ODD = [
    *(None, True, -1, 0, 0.5, 3, 2.0, math.nan, math.inf, 10**400, "", "x", "\udcff", b"x", [], {}),
    *((), ((0, 2),), [(1, 0.5)], range(3), int, print, np.int64(3), np.float32(0.5)),
    *(np.array([1, 2]), torch.tensor(3), torch.ones(3), torch.empty(3, device="meta"), object()),
    torch.eye(2).to_sparse(),
]


def refused(act) -> bool:
    try:
        act()
    except (TypeError, ValueError) as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        return True
    return False


@pytest.mark.parametrize("name", [spec.name for spec in fields(Settings)])
def test_settings_of_any_type_are_named_or_taken(name):
    outcomes = set()
    for value in ODD:
        try:
            Settings(**{name: value})
            outcomes.add("taken")
        except (TypeError, ValueError) as error:
            assert name.split("_")[0] in str(error), f"{value!r}: {error}"
            outcomes.add("refused")
    assert "refused" in outcomes


@pytest.mark.parametrize("name", ["numel", "comm", "group"])
def test_arguments_of_a_reducer_are_named_or_taken(name):
    for value in ODD:
        refused(lambda value=value: Reducer(**({"numel": 10} | {name: value})))


def attach_oddly(group) -> list[str]:
    """Arguments of `attach` that were neither taken nor refused by name."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)
    usual, wrong = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "verbose": False}, []
    for name in list(inspect.signature(attach).parameters)[1:]:
        for value in ODD:
            try:
                attach(model, **(usual | {name: value})).close()
            except (TypeError, ValueError) as error:
                if name not in str(error):
                    wrong.append(f"{name}={value!r}: {error}")
            except Exception as error:  # noqa: BLE001 - what the test looks for
                wrong.append(f"{name}={value!r}: {type(error).__name__}: {error}")
    return wrong


def test_arguments_of_attach_of_any_type_are_named_or_taken(worlds):
    assert worlds.run(1, attach_oddly) == [[]]


def test_gradients_of_any_type_are_refused_by_name():
    reducer = Reducer(3, density=0.5)
    for value in [*ODD, torch.eye(2).to_sparse(), torch.ones(3).int(), torch.ones(3, 1)]:
        if not (isinstance(value, torch.Tensor) and value.shape == (3,) and value.device.type):
            assert refused(lambda value=value: reducer.reduce_(value)), value


def places(value, way=()):
    yield way
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*way, key))


def test_states_of_a_reducer_of_any_type_are_refused_or_taken():
    """Every part of a state, replaced by everything odd; a refused state changes nothing."""
    reducer = Reducer(50, density=0.1)
    for step in range(3):
        reducer.reduce_(torch.randn(50, generator=torch.Generator().manual_seed(step)))
    good = reducer.state_dict()
    num_refused = 0
    for way in places(good):
        for value in ODD if way else ODD[4:]:
            state, at = copy.deepcopy(good), None
            if way:
                at = state
                for key in way[:-1]:
                    at = at[key]
                at[way[-1]] = value
            if refused(lambda state=state if way else value: reducer.load_state_dict(state)):
                num_refused += 1
                assert torch.equal(reducer.residual, good["residual"])
            reducer.load_state_dict(good)
    assert num_refused > 100
