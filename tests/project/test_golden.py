# SPDX-License-Identifier: Apache-2.0
"""Training ends with the bits that were recorded (golden.py says how to record them anew)."""

from __future__ import annotations

import json

import pytest

import golden
import speech


@pytest.fixture(scope="module")
def recorded(worlds):
    known = json.loads(golden.RECORDED.read_text())
    if worlds.run(1, _without_oktopk) != [known["without oktopk"]]:
        pytest.skip("recorded on a CPU that adds in another order")
    return known


def _without_oktopk(group) -> str:
    return golden.without_oktopk()


CASES = [
    pytest.param(P, wire, marks=[] if (P, wire) == (2, "bf16") else pytest.mark.slow)
    for P in golden.SIZES
    for wire in golden.WIRES
]


@pytest.mark.parametrize(("P", "wire"), CASES)
def test_training_ends_with_the_recorded_bits(worlds, recorded, P, wire):
    for found in worlds.run(P, golden.trained, (wire,), timeout=300):
        assert found == {name: bits for name, bits in recorded[f"P = {P}"].items() if wire in name}


def test_a_resumed_run_ends_with_the_recorded_bits(worlds, recorded):
    assert recorded["resumed"] == recorded["P = 2"]["oktopk bf16 adamw"]
    assert worlds.run(2, golden.resumed) == [recorded["resumed"]] * 2


def test_a_run_records_the_same_metrics(worlds, recorded, corpus, tmp_path):
    answer = worlds.run(2, speech.train, corpus, str(tmp_path), {"epochs": 2}, False)[0]
    assert golden.metrics_of(answer[0]) == recorded["metrics"]
