# SPDX-License-Identifier: Apache-2.0
"""Odd arguments and states of the library itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.comm.simulated import single_rank_comm
from oktopk.settings import Settings
from torture import odd
from torture.desk import WRONG, Desk, Input, LostError, group
from torture.ranks import digest


class Attached:
    """A model with a handle, and a step of it; made again when an input broke it."""

    made: Any = None

    def __init__(self) -> None:
        group()
        torch.manual_seed(0)
        self.model = DistributedDataParallel(torch.nn.Linear(40, 30))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.handle = oktopk.attach(
            self.model, density=0.2, warmup_steps=1, optimizer=self.optimizer, ramp_steps=0
        )
        for _ in range(5):
            self.step()
        self.state = self.handle.state_dict()

    def step(self) -> None:
        self.model(torch.ones(3, 40)).square().mean().backward()
        self.optimizer.step()

    @classmethod
    def get(cls) -> Attached:
        cls.made = cls.made or cls()
        return cls.made


def handle_state(desk: Desk) -> Input:
    """A state that is odd is refused and changes nothing, or the next step works with it."""
    one, rng = Attached.get(), desk.rng
    state: Any = dict(one.state)
    if rng.random() < 0.6:
        metadata, what = odd.changed(rng, json.loads(state["metadata"]), odd.plain)
        state["metadata"] = json.dumps(metadata)
    else:
        state, what = odd.changed(rng, state)
    return Input(what, lambda: _load(one, state, one.step), WRONG)


def _load(one: Any, state: Any, step: Callable[[], Any]) -> None:
    handle = one.handle
    before = digest(handle.state_dict())
    Attached.made = None  # until all went well
    try:
        handle.load_state_dict(state)
    except WRONG as error:
        if digest(handle.state_dict()) != before:
            raise LostError(f"the handle was changed, though it refused: {error}") from error
        Attached.made = one
        raise
    step()
    handle.load_state_dict(one.state)
    Attached.made = one


def reducer_state(desk: Desk) -> Input:
    reducer = oktopk.Reducer(500, density=0.1, comm=single_rank_comm())
    for seed in range(3):
        reducer.reduce_(torch.randn(500, generator=torch.Generator().manual_seed(seed)))
    before = digest(reducer.state_dict())
    state, what = odd.changed(desk.rng, reducer.state_dict())

    def call() -> None:
        try:
            reducer.load_state_dict(state)
        except WRONG as error:
            if digest(reducer.state_dict()) != before:
                raise LostError(f"the reducer was changed, though it refused: {error}") from error
            raise
        reducer.reduce_(torch.ones(500))

    return Input(what, call, WRONG)


SETTINGS = tuple(Settings.__slots__)

ATTACH = (
    *(
        "method",
        "density",
        "warmup_steps",
        "ramp_steps",
        "policy",
        "on_step",
        "optimizer",
        "scaler",
    ),
    *("clip_before", "total_steps", "timeout", "check_every", *SETTINGS, "nonsense"),
)


def settings_argument(desk: Desk) -> Input:
    name, new = desk.rng.choice(SETTINGS), odd.value(desk.rng)
    return Input(f"Settings({name}={new!r})", lambda: Settings(**{name: new}), WRONG, (name,))


def attach_argument(desk: Desk) -> Input:
    name, new = desk.rng.choice(ATTACH), odd.value(desk.rng)
    group()

    def call() -> None:
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        handle = oktopk.attach(model, **{name: new})
        handle.close()

    return Input(
        f"attach({name}={new!r})", call, WRONG, (name, "max_beta1", "staleness_correction")
    )


def reducer_argument(desk: Desk) -> Input:
    """Odd arguments of Reducer, or an odd gradient."""
    rng, new = desk.rng, odd.value(desk.rng)
    names = ("numel", "group", "comm", "nonsense", *SETTINGS)
    name = rng.choice(names)
    if rng.random() < 0.3:
        reducer = oktopk.Reducer(3, comm=single_rank_comm())
        return Input(f"reduce_({new!r})", lambda: reducer.reduce_(new), WRONG)
    given = {"numel": 100} | {name: new}
    if name == "comm":
        return Input(f"Reducer(comm={new!r})", lambda: oktopk.Reducer(**given), WRONG)
    return Input(f"Reducer({name}={new!r})", lambda: oktopk.Reducer(**given), WRONG, (name,))


KINDS: dict[str, Callable[[Desk], Input]] = {
    "handle-state": handle_state,
    "reducer-state": reducer_state,
    "settings-argument": settings_argument,
    "attach-argument": attach_argument,
    "reducer-argument": reducer_argument,
}
