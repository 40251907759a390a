# SPDX-License-Identifier: Apache-2.0
"""Dense inside the node, sparse between nodes: `attach(..., local_group=...)`."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import Net, batch
from oktopk.exchange.saved_state import RANKS

SPARSE = {"density": 0.02, "warmup_steps": 2, "check_every": 3}


@cache  # every group has threads, until the process ends
def nodes(size: int | None) -> dist.ProcessGroup | None:
    """The group of this rank's node, where nodes have `size` consecutive ranks; None has none."""
    if size is None:
        return None
    first = range(0, dist.get_world_size(), size)
    groups = [dist.new_group(list(range(start, start + size))) for start in first]
    return groups[dist.get_rank() // size]


def build(attached: dict | None, local_group=None, optimizer: type = torch.optim.SGD):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.02)
    more = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    optimizer = optimizer(model.parameters(), lr=0.05 if more else 1e-3, **more)
    handle = None
    if attached is not None:
        how = {"optimizer": optimizer, "ramp_steps": 0} | attached
        handle = oktopk.attach(model, local_group=local_group, **how)
    return model, optimizer, handle


def take_steps(model, optimizer, steps) -> None:
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(dist.get_rank(), step)
        cross_entropy(model(x), y).backward()
        optimizer.step()


def averaged(group, local_group) -> float:
    model = DistributedDataParallel(torch.nn.Linear(4, 4, bias=False).half())
    handle = oktopk.attach(model, local_group=nodes(2) if local_group else None, warmup_steps=9)
    model(torch.full((1, 4), 200.0).half()).backward(torch.full((1, 4), 200.0).half())
    handle.close()
    return float(model.module.weight.grad.max())


@pytest.mark.parametrize("local_group", [False, True])
def test_16_bit_gradients_do_not_overflow_in_the_sum_of_a_node(worlds, local_group):
    assert worlds.run(4, averaged, local_group) == [40_000.0] * 4


def weights_of(model) -> dict:
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def trained(group, steps: int, attached: dict | None, size: int | str | None) -> tuple:
    local_group = nodes(size) if isinstance(size, int) else size
    model, optimizer, handle = build(attached, local_group)
    take_steps(model, optimizer, range(steps))
    told = None
    if handle is not None:
        inside = handle.traffic["shard"]
        told = handle.stats, inside, dict(handle.residuals), handle.driver.engine.shares
        handle.close()
    return weights_of(model), told


def assert_same_bits(ranks: list[dict]) -> None:
    for other in ranks[1:]:
        for name, value in ranks[0].items():
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("size", [1, 2, 4])
def test_density_one_is_ddp_whatever_the_size_of_a_node(worlds, size):
    reference = worlds.run(4, trained, 6, None, None)
    ours = worlds.run(4, trained, 6, {"density": 1.0, "warmup_steps": 0}, size)
    assert_same_bits([weights for weights, _ in ours])
    for name, value in ours[0][0].items():
        torch.testing.assert_close(value, reference[0][0][name], rtol=2e-6, atol=2e-6)


def test_the_ranks_of_a_machine_are_one_node(worlds):
    for _, told in worlds.run(4, trained, 4, SPARSE, "node"):
        stats, inside, _, _ = told
        assert stats.bytes_sent == 0  # one node has nobody to send to
        assert inside.payload_sent > 0


def test_all_agree_at_two_percent_and_k_is_of_the_model(worlds):
    answers = worlds.run(4, trained, 9, SPARSE, 2)
    assert_same_bits([weights for weights, _ in answers])
    sparse = 3 * 48 * 48
    for _, (stats, inside, residuals, shares) in answers:
        assert sum(shares) == round(0.02 * sparse)
        assert stats.bytes_sent < stats.bytes_dense / 2
        assert inside.payload_sent > 0 and residuals


def conserved(group, steps: int) -> list[tuple]:
    """By step: the gradient of this rank, the average that arrived, and residuals before, after."""
    model, _, handle = build(SPARSE | {"wire": "fp32"}, nodes(2))
    done = []
    for step in range(steps):
        before = handle.state_dict()["residuals"]
        x, y = batch(dist.get_rank(), step)
        model.zero_grad()
        with model.no_sync():
            cross_entropy(model(x), y).backward()
        mine = {n: p.grad.clone() for n, p in model.module.named_parameters()}
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        arrived = {n: p.grad.clone() for n, p in model.module.named_parameters()}
        done.append((mine, arrived, before, handle.state_dict()["residuals"]))
    handle.close()
    return done


def test_nothing_is_lost(worlds):
    """Residuals are of means over a node: their sum over nodes is what is conserved."""
    ranks = worlds.run(4, conserved, 6)
    for step in range(6):
        for name in ranks[0][step][0]:
            mean = sum(rank[step][0][name].double() for rank in ranks) / 2
            had = mean + sum(rank[step][2][name].double() for rank in ranks)
            have = 2 * ranks[0][step][1][name].double()
            have += sum(rank[step][3][name].double() for rank in ranks)
            torch.testing.assert_close(had, have, rtol=1e-4, atol=1e-6)


def with_a_nan(group) -> tuple:
    model, optimizer, handle = build(SPARSE | {"warmup_steps": 0}, nodes(2))
    take_steps(model, optimizer, range(1))
    before = weights_of(model)
    x, y = batch(dist.get_rank(), 1)
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    if dist.get_rank() == 3:  # in one entry, and so in one slice
        model.module.head.weight.register_hook(lambda g: g.index_put((torch.tensor(0),), g[0] / 0))
    loss.backward()
    zero = all(not p.grad.any() for p in model.parameters())
    take_steps(model, optimizer, ())
    handle.close()
    return zero, handle.skipped_steps, before


def test_a_nan_on_one_rank_is_skipped_by_all(worlds):
    for zero, skipped, _ in worlds.run(4, with_a_nan):
        assert zero and skipped == 1


def resumed(group, kind: str, stop: int, old: int, new: int, folder: str = "") -> tuple:
    """A run that never stopped, and one that was resumed with nodes of another size.

    From a folder, if one is given, else from the states of all ranks."""
    optimizer = getattr(torch.optim, kind)
    model, stepper, handle = build(SPARSE, nodes(old), optimizer)
    take_steps(model, stepper, range(stop))
    saved = handle.gathered_state_dict()
    if folder:
        handle.save(folder)
    kept = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    moments = stepper.state_dict()
    moments = torch.utils._pytree.tree_map(
        lambda x: x.clone() if isinstance(x, torch.Tensor) else x, moments
    )
    take_steps(model, stepper, range(stop, 9))
    handle.close()
    again, other, second = build(SPARSE, nodes(new), optimizer)
    with torch.no_grad():
        for name, p in again.module.named_parameters():
            p.copy_(kept[name])
    other.load_state_dict(moments)
    if folder:
        second.load(folder)
    else:
        second.load_state_dict(saved)
    total = {n: r.double() for n, r in second.state_dict()["residuals"].items()}
    take_steps(again, other, range(stop, 9))
    second.close()
    return weights_of(model), weights_of(again), saved[RANKS], total


@pytest.mark.parametrize(("kind", "folder"), [("SGD", ""), ("AdamW", ""), ("SGD", "saved")])
def test_a_resumed_run_has_the_same_bits(worlds, tmp_path, kind, folder):
    where = folder and str(tmp_path / folder)
    for straight, again, _, _ in worlds.run(4, resumed, kind, 5, 2, 2, where):
        for name, value in straight.items():
            assert torch.equal(value, again[name]), name


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (2, None), (None, 2)])
def test_nodes_of_another_size_keep_the_sum_of_residuals(worlds, old, new):
    answers = worlds.run(4, resumed, "SGD", 5, old, new)
    assert_same_bits([again for _, again, _, _ in answers])
    for name in answers[0][3]:
        now = sum(total[name] for _, _, _, total in answers)
        saved = [state["residuals"][name].double() for state in answers[0][2]]
        # one addition in float32 at most: its rounding is relative to what was added
        rounding = torch.finfo(torch.float32).eps * sum(residual.abs() for residual in saved)
        assert ((now - sum(saved)).abs() <= rounding).all(), name


def one_wrong_state(group) -> str:
    """The error on this rank when only rank 3 has a wrong state."""
    model, optimizer, handle = build(SPARSE, nodes(2))
    state = {} if dist.get_rank() == 3 else handle.state_dict()
    with pytest.raises(ValueError) as error:
        handle.load_state_dict(state)
    take_steps(model, optimizer, range(2))
    handle.close()
    return str(error.value)


def test_a_state_that_one_rank_refuses_is_loaded_by_none(worlds):
    texts = worlds.run(4, one_wrong_state)
    assert "not a state of a handle" in texts[3]
    assert all("the loaded state" in text and "refused" in text for text in texts[:3])


def refusals(group) -> list[str]:
    texts = []
    for how in ({"local_group": "rack"}, {"local_group": "node", "method": "auto"}):
        torch.manual_seed(0)
        try:
            oktopk.attach(DistributedDataParallel(Net()), timeout=10.0, **how)
        except (TypeError, ValueError) as error:
            texts.append(str(error))
    try:
        model = DistributedDataParallel(Net(), find_unused_parameters=True)
        oktopk.attach(model, local_group="node")
    except ValueError as error:
        texts.append(str(error))
    return texts


def test_what_cannot_work_is_refused(worlds):
    for texts in worlds.run(2, refusals):
        assert "must be 'node', or the process group" in texts[0]
        assert "name a method" in texts[1] and "find_unused_parameters" in texts[2]
