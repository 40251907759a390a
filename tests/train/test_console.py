# SPDX-License-Identifier: Apache-2.0
"""What a run says while it trains and when it has finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from oktopk.lab.runlog.schema import StepRecord
from oktopk.lab.runlog.writer import RunTotals
from oktopk.lab.train.config import Config
from oktopk.lab.train.console import ProgressBar
from oktopk.lab.train.run import summary
from oktopk.lab.train.validate import Validation
from oktopk.utils.arguments import format_duration


def step(number: int, sent: int) -> StepRecord:
    sizes = {"bytes_sent": sent, "bytes_dense": 100, "numel": 50, "result": 1.0}
    return StepRecord(step=number, phase="sparse", loss=2.0, whole=0.5, **sizes)


def test_a_resumed_run_counts_the_bytes_of_all_its_steps(capsys):
    totals = RunTotals()
    for number in range(3):
        totals.add(step(number, sent=100))
    resumed = ProgressBar(4, 3, Config(log_every=1), totals)
    last = step(3, sent=20)
    totals.add(last)
    resumed.step(last)
    assert "bytes saved 20%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "left"),
    [
        (Config(log_every=1, max_minutes=2.0), "  2:00 left"),
        (Config(log_every=1, max_minutes=2.0, until="wer<0.3"), "  at most 2:00 left"),
    ],
)
def test_no_more_time_is_left_than_the_limit_allows(capsys, monkeypatch, config, left):
    now = iter((0.0, 60.0))
    monkeypatch.setattr("oktopk.lab.train.console.time.monotonic", lambda: next(now))
    totals = RunTotals()
    progress = ProgressBar(1000, 0, config, totals)
    totals.add(step(0, sent=100))
    progress.step(step(0, sent=100))
    assert capsys.readouterr().out.strip().endswith(left)


@pytest.mark.parametrize(("wer", "said"), [(0.2, "was reached"), (0.4, "was not reached")])
def test_the_last_lines_say_whether_the_target_was_reached(wer, said):
    totals = RunTotals()
    for number in range(4):
        totals.add(step(number, sent=10))
    metrics = {"wer": wer, "cer": 0.1, "val_loss": 1.0}
    result = Validation(metrics=metrics, examples=10, samples=[])
    config = Config(name="a", until="wer<0.3")
    lines = summary(config, result, totals, 9.0, Path("runs/a"), workers=2)
    assert f"WER <= 0.3 {said} after 4 steps, 0:02 of training" in lines


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (0.42, "0.4 s"), (0.99, "1.0 s"), (1, "0:01"), (75, "1:15"), (3723, "1:02:03")],
)
def test_a_duration_is_never_shown_as_nothing(seconds, text):
    assert format_duration(seconds) == text
