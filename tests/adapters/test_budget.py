# SPDX-License-Identifier: Apache-2.0
"""`density="auto"`: the choice fits the time there is, is the same on every rank, and settles.

No test measures: networks are `Speeds` that the tests make up, and seconds are scripted.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import Net
from oktopk import simulate
from oktopk.adapters import budget as budgets
from oktopk.adapters.budget import Budget, BudgetOptions
from oktopk.exchange.budget import (
    DENSITIES,
    HEADROOM,
    NEARLY_AS_FAST,
    WIRES,
    Choice,
    Exchanged,
    Speeds,
    choose,
)
from oktopk.methods.base import KernelSpeed, Link
from rounds import same, start, take_steps, weights_of

MBIT = 1e6 / 8
WHAT = Exchanged(numel=25_000_000, size=8, method="oktopk")
CODECS = {"plain": 1e-9, "bf16": 10e-9, "int8": 20e-9, "int4": 60e-9}


def network(mbit: float, latency: float = 1e-3) -> Speeds:
    kernels = KernelSpeed(per_element=0.5e-9, per_entry=20e-9)
    return Speeds(Link(latency, mbit * MBIT), kernels, CODECS)


NOW = Choice(0.05, "bf16")


@pytest.mark.parametrize("mbit", [1, 10, 100, 1e3, 1e5])
@pytest.mark.parametrize("limit", [1e-3, 0.1, 1.0, 30.0])
def test_the_choice_is_the_highest_density_that_fits(mbit, limit):
    speeds = network(mbit)
    density, wire = choose(speeds, WHAT, WIRES, limit=limit, now=NOW)
    best = {d: min(speeds.predict(Choice(d, w), WHAT) for w in WIRES) for d in DENSITIES}
    nearly = NEARLY_AS_FAST * min(best.values())
    room = {d: max(nearly, limit * (HEADROOM if d > NOW.density else 1)) for d in DENSITIES}
    assert density == max(d for d in DENSITIES if best[d] <= room[d])
    taken = speeds.predict(Choice(density, wire), WHAT)
    assert taken == min(speeds.predict(Choice(density, codec), WHAT) for codec in WIRES)


def test_slow_links_get_small_codecs_and_fast_links_the_fastest():
    chosen = [choose(network(mbit), WHAT, WIRES, limit=2.0, now=NOW) for mbit in (5, 1e3, 1e5)]
    assert [wire for _, wire in chosen] == ["int4", "bf16", "plain"]
    densities = [density for density, _ in chosen]
    assert densities == sorted(densities) and densities[0] < densities[-1]


def test_latency_is_no_reason_to_send_less(caplog):
    """Where rounds take nearly all of the time, a low density saves next to nothing."""
    far = network(1000, latency=0.05)
    what = Exchanged(numel=1_000_000, size=4, method="topkdsa", shared_by=4)
    assert choose(far, what, WIRES, limit=0.1, now=NOW).density == DENSITIES[-1]

    def revised(comm):
        budget = Budget(BudgetOptions(0.2, WIRES), what, NOW, far, 0)
        for step in (0, 1):
            budget.note(step, 0.1, far.predict(NOW, what))
        return budget.revise(2, comm, torch.device("cpu"))

    assert simulate(4, revised)[0].density == DENSITIES[-1]
    (told,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert "no density keeps the exchange under exchange_share=0.2" in told


def test_ranks_that_share_a_density_select_a_part_of_it():
    alone, shared = (replace(WHAT, shared_by=ranks) for ranks in (1, 8))
    speeds, choice = network(100), Choice(0.1, "bf16")
    assert speeds.predict(choice, shared) == speeds.predict(Choice(0.0125, "bf16"), alone)


def run(budget: Budget, comm, true: Speeds, compute: float, exchanges: range) -> list[Choice]:
    """Exchanges on a network that is not as probed; what was chosen for each of them."""
    chosen = []
    for step in exchanges:
        chosen.append(budget.now)
        own = compute * (1 + comm.rank / 10)
        waited = compute * (comm.size - 1 - comm.rank) / 10  # for the slowest rank
        seconds = true.predict(budget.now, WHAT) + waited
        if budget.is_due(step):
            budget.revise(step, comm, torch.device("cpu"))
        budget.note(step, own, seconds)
    return chosen


def make(speeds: Speeds, share: float = 0.2, first: int = 0) -> Budget:
    return Budget(BudgetOptions(share, WIRES), WHAT, NOW, speeds, first)


@pytest.mark.parametrize("wrong_by", [0.1, 1, 10])
def test_it_settles_under_the_share_on_a_network_that_was_probed_wrongly(wrong_by):
    """Ranks compute for 1.0 to 1.3 s: 0.2 of the step is a quarter of the slowest one's 1.3 s."""
    true = network(200)
    probed = replace(true, link=Link(true.link.latency, true.link.bandwidth * wrong_by))
    ranks = simulate(4, lambda comm: run(make(probed), comm, true, 1.0, range(80)))
    assert all(chosen == ranks[0] for chosen in ranks)
    settled = ranks[0][-1]
    assert set(ranks[0][40:]) == {settled}
    limit = 1.3 * 0.2 / 0.8
    assert true.predict(settled, WHAT) <= limit
    above = DENSITIES[DENSITIES.index(settled.density) + 1]
    best = min(true.predict(Choice(above, wire), WHAT) for wire in WIRES)
    assert best > HEADROOM * limit  # the next density would not have fit


def test_it_follows_a_network_that_becomes_slower_and_says_so(caplog):
    caplog.set_level(logging.INFO, "oktopk")

    def both(comm):
        budget = make(network(1000))
        before = run(budget, comm, network(1000), 1.0, range(40))
        return before[-1], run(budget, comm, network(10), 1.0, range(40, 120))[-1]

    ((before, after), *others) = simulate(2, both)
    assert others == [(before, after)]
    assert after.density < before.density
    told = [record.message for record in caplog.records if "instead of" in record.message]
    assert f"density {after.density:g} as {after.wire}" in told[-1]
    assert len(told) < 8  # once, by rank 0, when it changes


def test_warm_up_and_ramp_are_not_measured():
    budget = make(network(100), first=10)
    assert not any(budget.is_due(step) for step in range(11))
    for step in range(12):
        budget.note(step, 1.0, 1.0)
    assert len(budget.measured) == 2


def test_without_measurements_the_choice_stays():
    def revised(comm):
        budget = make(network(100))
        if comm.rank:
            budget.note(0, 1.0, 1e-9)
        return budget.revise(2, comm, torch.device("cpu"))

    assert simulate(2, revised) == [NOW, NOW]


# In training: probes and seconds are replaced.


@pytest.fixture
def scripted(monkeypatch):
    """A network of 100 Mbit/s whose exchanges take as long as predicted, and 10 s of computing."""
    speeds = network(100)
    monkeypatch.setattr(budgets, "probe_speeds", lambda comm, device, wires: speeds)
    note = Budget.note

    def note_predicted(self, step, compute, exchange):
        note(self, step, 10.0, speeds.predict(self.now, self.what))

    monkeypatch.setattr(Budget, "note", note_predicted)


AUTO = {"density": "auto", "every": 2, "outer_momentum": 0.0}


def trained(comm, steps: range, state=None, **more) -> tuple:
    net, optimizer, handle = start(comm, **AUTO, **more)
    if state is not None:
        optimizer.load_state_dict(state[0])
        handle.load_state_dict(state[1])
    seen = []
    handle.on_step = lambda stats: seen.append(
        (stats.k, handle.settings.wire, stats.stages, (stats.local, stats.result))
    )
    take_steps(net, optimizer, comm.rank, steps)
    states = optimizer.state_dict(), handle.state_dict()
    handle.close()
    return weights_of(net), seen, states, handle


@pytest.mark.parametrize("P", [1, 2, 3])
def test_local_steps_send_more_where_there_is_time(scripted, P):
    # with a method that delivers k entries: the default one delivers what all ranks select
    ranks = simulate(P, lambda comm: trained(comm, range(12), method="oktopk"))
    weights, seen, _, handle = ranks[0]
    assert all(same(weights, other[0]) for other in ranks)
    assert handle.settings.density == max(DENSITIES)
    ks = [k for k, *_ in seen]
    assert ks[0] == ks[1] == ks[2] < ks[3] == ks[-1]  # revised in exchange 2, valid from 3 on
    told = [stages["budget"].header_sent if "budget" in stages else 0 for _, _, stages, _ in seen]
    assert told == [0, 0, 16 * (P - 1), 0, 16 * (P - 1), 0]  # two float64 to each other rank
    for k, _, _, counts in seen:  # k means k, also right after it has changed
        assert all(abs(count - k) <= 0.1 * k for count in counts), (k, counts)


def test_a_resumed_run_chooses_as_one_that_never_stopped(scripted):
    def stopped(comm, at: int):
        _, before, states, _ = trained(comm, range(at))
        weights, after, _, handle = trained(comm, range(at, 24), states)
        return weights, before + after, handle.settings

    whole = simulate(2, lambda comm: trained(comm, range(24)))
    for at in (4, 5, 6, 16):
        resumed = simulate(2, lambda comm, at=at: stopped(comm, at))
        for one, other in zip(whole, resumed, strict=True):
            assert same(one[0], other[0]) and one[1] == other[1]
            assert other[2] == one[3].settings


def test_the_codec_stays_if_it_was_asked_for(scripted):
    ((_, seen, _, _),) = simulate(1, lambda comm: trained(comm, range(12), wire="int8"))
    assert {wire for _, wire, *_ in seen} == {"int8"}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"density": "most"}, "density"),
        ({"exchange_share": 1.0}, "exchange_share"),
        ({"exchange_share": "much"}, "exchange_share"),
        ({"method": "dense"}, "dense"),
    ],
)
def test_what_cannot_be_chosen_is_refused(more, named):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises((TypeError, ValueError), match=named):
        oktopk.local_steps(net, optimizer, **({"density": "auto"} | more))


def refused_in_a_site(group) -> str:
    """A site of two ranks with DDP inside; the other sites do not matter."""
    model = DistributedDataParallel(Net(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        oktopk.local_steps(model, optimizer, density="auto")
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_of_a_site_would_choose_by_their_own_clocks(worlds):
    for said in worlds.run(2, refused_in_a_site):
        assert said.startswith("density='auto' does not work with DistributedDataParallel inside")


def attached(group, at: int | None) -> tuple:
    """DDP with `density="auto"`, stopped and resumed after `at` steps; None: never."""
    del group
    speeds, note = network(100), Budget.note

    def note_predicted(self, step, compute, exchange):
        note(self, step, 10.0, speeds.predict(self.now, self.what))

    steps, ks, states = range(24), [], None
    with (
        mock.patch.object(budgets, "probe_speeds", lambda comm, device, wires: speeds),
        mock.patch.object(Budget, "note", note_predicted),
    ):
        for part in [steps] if at is None else [steps[:at], steps[at:]]:
            torch.manual_seed(0)
            model = DistributedDataParallel(Net())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            handle = oktopk.attach(
                model, optimizer=optimizer, density="auto", warmup_steps=2, ramp_steps=4
            )
            for each, state in zip((model, optimizer, handle), states or (), strict=False):
                each.load_state_dict(state)
            handle.on_step = lambda stats: ks.append(stats.k)
            take_steps(model, optimizer, dist.get_rank(), part)
            states = [copy.deepcopy(each.state_dict()) for each in (model, optimizer, handle)]
            handle.close()
    return weights_of(model.module), ks, handle.settings


def test_attach_chooses_after_warm_up_and_ramp_and_resumes(worlds):
    whole = worlds.run(2, attached, None)
    resumed = worlds.run(2, attached, 13)
    (weights, ks, settings), other = whole
    assert same(weights, other[0]) and ks == other[1]
    assert settings.density == max(DENSITIES)
    assert len(set(ks[6:9])) == 1 and ks[9] > ks[8]  # revised in the third sparse step
    for one, again in zip(whole, resumed, strict=True):
        assert same(one[0], again[0]) and one[1:] == again[1:]
