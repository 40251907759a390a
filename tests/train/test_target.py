# SPDX-License-Identifier: Apache-2.0
"""Targets: what can be asked for, what is refused, and that a run ends there."""

from __future__ import annotations

import pytest

import speech
from oktopk.lab.tasks.base import Metric
from oktopk.lab.train.setup import parse_target

METRICS = (
    Metric("wer", "WER", best=0),
    Metric("accuracy", higher_is_better=True, best=1),
    Metric("val_loss"),
)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("wer<0.3", "wer", 0.3),
        (" wer <= 1e-1 ", "wer", 0.1),
        ("accuracy>0.9", "accuracy", 0.9),
        ("accuracy>=0.9", "accuracy", 0.9),
        ("loss=1.88", "val_loss", 1.88),
        ("wer==0", "wer", 0.0),
        ("wer<=0", "wer", 0.0),
        ("accuracy=1", "accuracy", 1.0),
        ("loss<-3", "val_loss", -3.0),
    ],
)
def test_a_target_is_a_metric_and_a_value(text, name, value):
    target = parse_target(text, METRICS)
    assert (target.metric.name, target.value) == (name, value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wer", "as in 'wer<0.3', got 'wer'"),
        ("", "as in 'wer<0.3', got ''"),
        ("cer<1", "no metric 'cer'; it has wer, accuracy, val_loss; did you mean 'wer'"),
        ("los<1", "no metric 'los'; it has wer, accuracy, val_loss; did you mean 'loss'?"),
        ("accuracy<0.9", "accuracy is better when it is higher: write 'accuracy>0.9'"),
        ("wer>0.3", "wer is better when it is lower: write 'wer<0.3'"),
        ("wer<low", "'low' is not a finite number"),
        ("wer<nan", "'nan' is not a finite number"),
        ("accuracy=99", "accuracy cannot be better than 1, got 'accuracy=99'"),
        ("wer<-0.1", "wer cannot be better than 0, got 'wer<-0.1'"),
        ("wer<0", "wer cannot be better than 0, got 'wer<0': write 'wer=0' for the best there is"),
        ("accuracy>1", "accuracy cannot be better than 1, got 'accuracy>1': write 'accuracy=1'"),
    ],
)
def test_what_is_wrong_with_a_target_is_said(text, message):
    with pytest.raises(ValueError, match="until") as caught:
        parse_target(text, METRICS)
    assert message in str(caught.value)


def test_reached_on_the_better_side_only():
    low, high = parse_target("wer<0.3", METRICS), parse_target("accuracy>0.9", METRICS)
    assert low.is_reached({"wer": 0.3}) and not low.is_reached({"wer": 0.31})
    assert high.is_reached({"accuracy": 0.9}) and not high.is_reached({"accuracy": 0.89})
    for unknown in ({}, {"wer": None}, {"wer": float("nan")}):
        assert not low.is_reached(unknown)


def test_a_run_ends_at_its_target_on_all_ranks(worlds, corpus, tmp_path):
    settings = {"epochs": 3, "validate_steps": 2, "until": "loss<1e9"}
    answers = worlds.run(2, speech.train, corpus, str(tmp_path), settings, False)
    assert answers[0][1].metrics == answers[1][1].metrics
    assert len(speech.entries(answers[0][0], "step")) == 2
    (validation,) = speech.entries(answers[0][0], "validation")
    assert validation["step"] == 1 and validation["seconds"] > 0
    (end,) = speech.entries(answers[0][0], "end")
    assert end["how"] == "finished"
    assert speech.entries(answers[0][0], "run")[0]["target"] == "validation loss <= 1e+09"


def test_a_run_ends_after_its_minutes_of_training(worlds, corpus, tmp_path):
    settings = {"epochs": 1000, "max_minutes": 0.01, "log_every": 1}
    answers = worlds.run(2, speech.train, corpus, str(tmp_path), settings, False)
    steps = speech.entries(answers[0][0], "step")
    assert 2 <= len(steps) < 500
    assert sum(step["whole"] for step in steps[:-1]) < 0.6 <= sum(step["whole"] for step in steps)
    assert speech.entries(answers[0][0], "validation")[-1]["step"] == steps[-1]["step"]


def test_validations_between_epochs_do_not_change_the_training(worlds, corpus, tmp_path):
    losses = []
    for every in (0, 2):
        settings = {"epochs": 2, "validate_steps": every}
        folder = worlds.run(2, speech.train, corpus, str(tmp_path / str(every)), settings, False)
        losses.append([step["loss"] for step in speech.entries(folder[0][0], "step")])
        known = speech.entries(folder[0][0], "validation")
        # once where an epoch ends at a multiple of the steps: after step 6 and after step 12
        assert len({one["step"] for one in known}) == len(known) == (6 if every else 2)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("best", ["0", float("nan"), float("inf")])
def test_the_best_value_of_a_metric_is_a_number(best):
    with pytest.raises(ValueError, match="metric mse: best must be a number or None"):
        Metric("mse", best=best)
