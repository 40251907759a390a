# SPDX-License-Identifier: Apache-2.0
"""Probes tell what selection missed, and change nothing."""

from __future__ import annotations

import pytest
import torch

import speech
from oktopk.lab.train.setup import selection_quality


def test_selection_qualityd_by_hand():
    acc = torch.tensor([3.0, -4.0, 1.0, 0.0])
    grad = torch.tensor([0.0, 5.0, 0.0, 0.0])
    result = torch.tensor([2.0, 0.0, 1.0, 0.0])
    found = selection_quality(acc, grad, result, 2)
    assert found["recall"] == 0.5
    assert found["energy"] == pytest.approx(10 / 26)
    assert found["best_energy"] == pytest.approx(25 / 26)
    assert found["xi"] == pytest.approx((1 + 16 + 1) ** 0.5 / 5)


def test_the_true_top_k_is_perfect():
    acc = torch.randn(100)
    best = torch.zeros(100)
    chosen = acc.abs().topk(10).indices
    best[chosen] = acc[chosen]
    found = selection_quality(acc, acc, best, 10)
    assert found["recall"] == 1 and found["xi"] == 0
    assert found["energy"] == found["best_energy"]


def test_nothing_at_all_is_a_size():
    assert selection_quality(*[torch.zeros(0)] * 3, 0) == {
        "recall": 1.0,
        "energy": 1.0,
        "best_energy": 1.0,
        "xi": 0.0,
    }


def test_an_advance_is_not_a_distance_from_the_true_top_k(worlds, corpus, tmp_path):
    """SGD gets more than was selected, and owes it: a rank alone still selects the true top k."""
    made = {"optimizer": "sgd", "probe_every": 1, "max_steps": 5}
    worlds.run(1, speech.train, corpus, str(tmp_path), made, False)
    probes = speech.entries(tmp_path / "tiny", "probe")
    assert [probe["step"] for probe in probes] == [2, 3, 4]
    assert all(probe["xi"] < 0.05 and probe["recall"] >= 0.9 for probe in probes)


@pytest.mark.parametrize("size", [1, 3])
def test_a_probed_run_has_the_bits_of_one_without(worlds, corpus, tmp_path, size):
    runs = {}
    for every in (0, 2):
        made = {"epochs": 1 if size == 1 else 3, "probe_every": every, "max_steps": 8}
        worlds.run(size, speech.train, corpus, str(tmp_path / str(every)), made, False)
        runs[every] = tmp_path / str(every) / "tiny"
    weights = [
        torch.load(speech.newest(runs[every]) / "common.pt", weights_only=True)["model"]
        for every in runs
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    steps = [[speech.timeless(e) for e in speech.entries(runs[every], "step")] for every in runs]
    assert steps[0] == steps[1]
    probes = speech.entries(runs[2], "probe")
    assert [probe["step"] for probe in probes] == [3, 5, 7]  # the sparse ones
    for probe in probes:
        assert 0 < probe["energy"] <= probe["best_energy"] <= 1 and probe["xi"] >= 0
        assert 0 < probe["recall"] <= 1
        assert 0 <= probe["age_mean"] <= probe["age_90"] + 1 <= probe["age_most"] + 2
        assert probe["age_most"] <= probe["step"] - 1  # all arrived in the dense phase
    if size == 1:  # its own top k is the true one, and it keeps nine tenths of it at least
        assert all(probe["recall"] >= 0.9 for probe in probes)
    assert not speech.entries(runs[0], "probe")
