# SPDX-License-Identifier: Apache-2.0
"""States through torch.distributed.checkpoint: each rank's own, or refused before they are lost."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from idioms import IDIOMS, SPARSE, build, one_step
from oktopk.errors import StateError
from rounds import start, take_steps

STREAMING = {"delay": 3, "fragments": 2}


def begun(group, how: str, steps: int):
    """A handle of a run that has taken so many steps."""
    rank = dist.get_rank(group)
    if how == "attach":
        model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, SPARSE)
        for step in range(steps):
            one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
        return handle
    net, optimizer, handle = start(group, **(STREAMING if how == "streaming" else {}))
    take_steps(net, optimizer, rank, range(steps))
    return handle


def equal(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class App:
    """As PyTorch's tutorial wraps what is saved."""

    def __init__(self, handle, by_rank: bool) -> None:
        self.handle, self.by_rank = handle, by_rank

    def state_dict(self) -> dict:
        return {"oktopk": (self.handle.by_rank if self.by_rank else self.handle).state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.handle.by_rank.load_state_dict(state["oktopk"])


def through_checkpoint(group, how: str, folder: str) -> list[bool]:
    handle = begun(group, how, 7)
    state, everyone = handle.state_dict(), handle.gathered_state_dict()
    parts = {"oktopk": handle.by_rank, "app": App(handle, True), "all": handle.gathered}
    dcp.save(parts, checkpoint_id=folder, process_group=group)
    handle.close()
    same = []
    for name in ("oktopk", "app"):
        again = begun(group, how, 0)
        part = again.by_rank if name == "oktopk" else App(again, True)
        dcp.load({name: part}, checkpoint_id=folder, process_group=group)
        same.append(equal(again.state_dict(), state))
        again.load_checkpoint(folder)
        same.append(equal(again.gathered_state_dict(), everyone))
        again.close()
    return same


@pytest.mark.parametrize("how", ["attach", "local_steps", "streaming"])
def test_every_rank_gets_its_own_state_back(worlds, tmp_path, how):
    assert worlds.run(2, through_checkpoint, how, str(tmp_path)) == [[True] * 4] * 2


def saved_by(group, how: str, folder: str) -> dict:
    handle = begun(group, how, 7)
    dcp.save({"ours": handle.by_rank}, checkpoint_id=folder, process_group=group)
    state = handle.state_dict()
    handle.close()
    return state


def loaded_by(group, how: str, folder: str, states: list[dict]) -> tuple[bool, list[str]]:
    by_list, by_checkpoint, said = begun(group, how, 0), begun(group, how, 0), []
    by_list.load_state_dict(states)
    by_checkpoint.load_checkpoint(folder, key="ours")
    same = equal(by_list.state_dict(), by_checkpoint.state_dict())
    for act in (
        lambda: by_list.load_checkpoint(folder),
        lambda: by_list.by_rank.load_state_dict({"0-of-9": ({},)}),
    ):
        try:
            act()
        except StateError as error:
            said.append(str(error))
    by_list.close()
    by_checkpoint.close()
    return same, said


@pytest.mark.parametrize(("how", "before", "now"), [("attach", 2, 3), ("streaming", 3, 1)])
def test_another_number_of_ranks_loads_a_checkpoint(worlds, tmp_path, how, before, now):
    states = worlds.run(before, saved_by, how, str(tmp_path))
    for same, said in worlds.run(now, loaded_by, how, str(tmp_path), states):
        assert same
        assert "the checkpoint has no state by rank under 'oktopk'" in said[0]
        assert "are loaded with handle.load_checkpoint" in said[1]


def refused(group, how: str, folder: str) -> list[str]:
    handle, said = begun(group, how, 3), []
    for part in (handle, App(handle, False)):
        for act in (dcp.save, dcp.load):
            try:
                act({"oktopk": part}, checkpoint_id=folder, process_group=group)
            except StateError as error:
                said.append(str(error))
    handle.close()
    return said


@pytest.mark.parametrize("how", ["attach", "local_steps"])
def test_a_state_whose_names_all_ranks_share_is_refused(worlds, tmp_path, how):
    for rank, said in enumerate(worlds.run(2, refused, how, str(tmp_path / "none"))):
        assert len(said) == 4
        assert all(
            text.startswith(f"rank {rank}: torch.distributed.checkpoint keeps") for text in said
        )
        assert all("handle.by_rank instead of the handle" in text for text in said)
        assert all("call handle.by_rank.state_dict(), whose names" in text for text in said)


def alone(group, folder: str) -> bool:
    handle = begun(group, "attach", 3)
    state = handle.state_dict()
    dcp.save({"oktopk": handle}, checkpoint_id=folder, process_group=group)
    handle.close()
    again = begun(group, "attach", 0)
    dcp.load({"oktopk": again}, checkpoint_id=folder, process_group=group)
    same = equal(state, again.state_dict())
    again.close()
    return same


def test_one_rank_has_no_names_to_share(worlds, tmp_path):
    assert worlds.run(1, alone, str(tmp_path)) == [True]
