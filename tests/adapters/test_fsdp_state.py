# SPDX-License-Identifier: Apache-2.0
"""The state of an FSDP model through torch.distributed.checkpoint: exact, and on other meshes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from oktopk.errors import StateError
from sites import MESHES, SPARSE, build, one_step, shards_of, whole

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
HOW = SPARSE | {"ramp_steps": 0}


def save(site, folder: str) -> None:
    model, optimizer = get_state_dict(site.model, site.optimizer)
    state = {"model": model, "optimizer": optimizer, "oktopk": site.handle.state_dict()}
    dcp.save(state, checkpoint_id=folder)


def load(site, folder: str) -> None:
    model, optimizer = get_state_dict(site.model, site.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        site.model,
        site.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    site.handle.load_checkpoint(folder)


def run(group, replicas: int, kind: str, folder: str, stop: int, steps: int) -> tuple:
    """The weights and residuals of a run, and of one that was resumed at `stop`."""
    site = attached(replicas, kind)
    for step in range(steps):
        if step == stop:
            save(site, folder)
        one_step(site, step)
    resumed = attached(replicas, kind)
    load(resumed, folder)
    for step in range(stop, steps):
        one_step(resumed, step)
    answers = []
    for each in (site, resumed):
        residuals = {name: r.clone() for name, r in each.handle.residuals.items()}
        answers.append((shards_of(each.model), residuals, each.stats[-1].k))
        each.handle.close()
    return tuple(answers)


def attached(replicas: int, kind: str):
    """With the preset of the optimizer: AdamW's has more to save."""
    return build(replicas, HOW, optimizer=OPTIMIZERS[kind], preset=True)


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("replicas", "ranks"), MESHES)
def test_a_resumed_run_has_the_same_bits(worlds, tmp_path, replicas, ranks, kind, stop):
    folder = str(tmp_path / "saved")
    for straight, resumed in worlds.run(ranks, run, replicas, kind, folder, stop, 12):
        assert straight[2] == resumed[2]
        for mine, other in zip(straight[:2], resumed[:2], strict=True):
            assert mine.keys() == other.keys() and mine
            for name, value in mine.items():
                assert torch.equal(value, other[name]), name


def sum_of_residuals(site) -> dict:
    """By parameter: the whole residuals, summed over replicas, and the sums of their magnitudes."""
    state = site.handle.state_dict()["residuals"]
    (mine,) = state.values()
    wholes = {name: x.full_tensor().double() for name, x in mine.items()}
    totals = {name: torch.stack([x, x.abs()]) for name, x in wholes.items()}
    for x in totals.values():
        dist.all_reduce(x, group=site.handle.comm.transport.group)
    return totals


def reshard(group, folder: str, old: int, new: int) -> tuple:
    """Sums of residuals before and after a change of the number of replicas, and weights after."""
    site = attached(old, "adamw")
    for step in range(6):
        one_step(site, step)
    save(site, folder)
    before = sum_of_residuals(site)
    site.handle.close()
    other = attached(new, "adamw")
    load(other, folder)
    after, steps = sum_of_residuals(other), other.handle.step
    for step in range(6, 9):
        one_step(other, step)
    weights = whole(other.model)
    other.handle.close()
    return before, after, steps, weights


@pytest.mark.parametrize(
    ("old", "new"),
    [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow), (2, 1)],
)
def test_another_mesh_keeps_the_sum_of_residuals(worlds, tmp_path, old, new):
    answers = worlds.run(4, reshard, str(tmp_path / "saved"), old, new)
    for before, after, steps, weights in answers:
        assert steps == 6 and any(x.any() for x in before.values())
        for name, (total, magnitude) in before.items():
            # one addition in float32 at most: its rounding is relative to what was added
            rounding = torch.finfo(torch.float32).eps * magnitude
            assert ((after[name][0] - total).abs() <= rounding).all(), name
        for name, value in answers[0][3].items():
            assert torch.equal(value, weights[name]), name


def wrong_states(group) -> list[str]:
    site, texts, rank = attached(2, "sgd"), [], dist.get_rank()
    right = site.handle.state_dict()
    (text,) = right["metadata"].values()
    wrong = [
        {},
        right | {"metadata": {}},
        right | {"metadata": {"0-0": text.replace(f'"rank": {rank}', f'"rank": {(rank + 1) % 4}')}},
        right | {"metadata": {"0-0": text.replace('"world_size": 4', '"world_size": 8')}},
    ]
    wrong += [
        right | {"residuals": {}},
        right | {"residuals": []},
        right | {"arrived": {"head.bias": 3}},
    ]
    for state in wrong:
        with pytest.raises(StateError) as error:
            site.handle.load_state_dict(state)
        texts.append(str(error.value))
    with pytest.raises(TypeError, match="not gathered on one rank"):
        site.handle.gathered_state_dict()
    for by_rank in (site.handle.save, site.handle.load):
        with pytest.raises(TypeError, match="load it with handle"):
            by_rank("saved")
    site.handle.close()
    return texts


def test_a_state_that_does_not_fit_is_refused(worlds):
    for texts in worlds.run(4, wrong_states):
        empty, no_text, other_rank, other_mesh, no_residuals, a_list, no_tensor = texts
        assert "no residuals of replica" in no_residuals and "by its number" in a_list
        assert "the arrived in the state must be tensors" in no_tensor
        assert "not a state of attach_fsdp" in empty and "text of a rank" in no_text
        assert "load each rank's own" in other_rank
        assert "load it with handle.load_checkpoint" in other_mesh


def one_wrong_state(group) -> tuple[str, int]:
    """The error on this rank when only rank 3 has a wrong state, and the steps after it."""
    site = attached(2, "sgd")
    state = {} if dist.get_rank() == 3 else site.handle.state_dict()
    with pytest.raises(ValueError) as error:  # StateError is one
        site.handle.load_state_dict(state)
    one_step(site, 0)
    site.handle.close()
    return str(error.value), site.handle.step


def test_a_state_that_one_rank_refuses_is_loaded_by_none(worlds):
    """FSDP's own collectives would keep the other ranks waiting."""
    answers = worlds.run(4, one_wrong_state)
    assert "not a state of attach_fsdp" in answers[3][0]
    for text, steps in answers[:3]:
        assert "the loaded state" in text and "rank" in text and "refused" in text
        assert steps == 1
