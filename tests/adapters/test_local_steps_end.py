# SPDX-License-Identifier: Apache-2.0
"""Ranks that end, or fail, while an exchange of local steps is in flight."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import oktopk
from rounds import fragments_of, same, start, take_steps, weights_of

# A script that ends.


def last_rank(folder, how: str) -> tuple[str, int]:
    """What rank 1 said, and how many exchanges it applied."""
    code = "import sys, rounds; rounds.ends_in_flight(int(sys.argv[1]), *sys.argv[2:])"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), folder, how], env=environ)
        for rank in range(2)
    ]
    assert ranks[1].wait(60) == 0
    assert ranks[0].wait(60) == 0 or how == "soon"  # a thread is left in a wait of gloo there
    return torch.load(folder / "said")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", ["exit", "destroy"])
def test_a_script_that_ends_lets_its_last_exchange_end(tmp_path, how):
    assert last_rank(tmp_path, how) == ("", 2)


@pytest.mark.timeout(90)
def test_a_script_that_ends_much_sooner_is_named_by_the_others(tmp_path):
    said, exchanges = last_rank(tmp_path, "soon")
    assert exchanges == 1 and "not registered" not in said
    assert (
        "rank 0 failed in step 1: RuntimeError: it ended, by close() or with its script, " in said
    )
    assert "call exchange() on every rank at the end of training" in said


# A rank that fails.


def saved_after_a_failure(group, folder: str, more: dict) -> tuple:
    """Rank 1 fails in the second exchange; the others save what they have."""
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group, **more)
    take_steps(net, optimizer, rank, range(7))
    before = handle.state_dict()
    if rank == 1:

        def boom(like):
            raise ArithmeticError("boom")

        handle.driver.engine.begin = boom
    errors = []
    for step in range(7, 12):
        try:
            take_steps(net, optimizer, rank, range(step, step + 1))
        except (ArithmeticError, RuntimeError, oktopk.ExchangeError) as error:
            errors.append(type(error).__name__)
            break
    weights = weights_of(net)
    handle.save(folder)
    state = handle.state_dict()
    handle.close()
    dist.barrier(group)
    return before, state, weights, errors


@pytest.mark.parametrize("more", [{}, {"delay": 2}, {"delay": 2, "fragments": 2}])
def test_after_a_failed_exchange_every_rank_saves_the_state_before_it(worlds, tmp_path, more):
    ranks = worlds.run(3, saved_after_a_failure, str(tmp_path), more)
    for rank, (before, state, weights, errors) in enumerate(ranks):
        assert errors == ["ArithmeticError" if rank == 1 else "ExchangeError"]
        first, had = fragments_of(state)[0], fragments_of(before)[0]
        for key in ("anchor", "residuals", "momentum"):
            assert same(first[key], had[key]), key
        assert not first["launched"] and first["local_steps"] >= 4
        assert same(first["weights"], {name: weights[name] for name in first["weights"]})
    for left in worlds.run(3, goes_on, str(tmp_path), more):
        assert left == [4 + 4 * ("fragments" in more), True]


def goes_on(group, folder: str, more: dict) -> list:
    """From what was saved, every rank goes on to the next exchange."""
    rank = dist.get_rank(group)
    net, optimizer, handle = start(group, seed=9, **more)
    handle.load(folder)
    before = handle.step
    take_steps(net, optimizer, rank, range(12, 24))
    handle.exchange()
    anchors = [driver.anchor.clone() for driver in handle.drivers]
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    dist.barrier(group)
    handle.close()
    return [handle.step - before, torch.equal(weights, torch.cat(anchors))]
