"""Saved states: whether one fits this run, and this rank's share of another number of ranks'."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch

from oktopk.comm import Comm

State = dict[str, Any]
"""`residuals` and `arrived` by name, and `facts` as JSON."""


def fitting(
    state: State | list[State], comm: Comm, method: str | None, names: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The facts, residuals and arrivals this rank goes on with; ValueError says what is wrong.

    A `method` of None takes any.
    """
    for each in [state] if isinstance(state, dict) else state:
        if not {"facts", "residuals"} <= set(each):
            raise ValueError(
                f"rank {comm.rank}: not a state of a handle: expected what `state_dict` gave, with "
                f"'facts' and 'residuals', got {sorted(each) or 'an empty one'}"
            )
    mine = state if isinstance(state, dict) else _taken_over(state, comm)
    facts, owed = json.loads(mine["facts"]), mine["residuals"]
    if facts["world_size"] != comm.size:
        raise ValueError(
            f"rank {comm.rank}: the state was saved by {facts['world_size']} ranks and "
            f"there are {comm.size}: pass the list of all ranks' states"
        )
    if method is not None and facts["method"] != method:
        raise ValueError(
            f"rank {comm.rank}: the state was saved with method={facts['method']!r} and this is "
            f"{method!r}: attach with the method it was saved with"
        )
    if set(owed) != set(names):
        raise ValueError(
            f"rank {comm.rank}: the state is of another model; only one of them has "
            f"{sorted(set(owed) ^ set(names))}"
        )
    return facts, owed, mine.get("arrived", {})


def _taken_over(states: list[State], comm: Comm) -> State:
    """Rank r takes over what ranks r, r+P, ... owed, so the sum over ranks stays what it was."""
    if not states:
        raise ValueError(f"rank {comm.rank}: the list of states is empty: pass those of all ranks")
    ordered = sorted(states, key=lambda state: json.loads(state["facts"])["rank"])
    facts = [json.loads(state["facts"]) for state in ordered]
    ranks = [its["rank"] for its in facts]
    if ranks != list(range(facts[0]["world_size"])):
        raise ValueError(
            f"rank {comm.rank}: expected the states of all {facts[0]['world_size']} ranks that "
            f"saved, each once, got those of ranks {ranks}"
        )
    if len(ranks) == comm.size:
        return ordered[comm.rank]
    mine = ordered[comm.rank :: comm.size]
    owed = {
        name: sum((state["residuals"][name] for state in mine), torch.zeros_like(like))
        for name, like in ordered[0]["residuals"].items()
    }
    engine = facts[0]["engine"] | {"numels": []}  # thresholds and bounds were for other ranks
    return {
        "residuals": owed,
        "arrived": ordered[0].get("arrived", {}),  # the same on every rank
        "facts": json.dumps(facts[0] | {"world_size": comm.size, "engine": engine}),
    }
