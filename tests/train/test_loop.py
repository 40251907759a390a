# SPDX-License-Identifier: Apache-2.0
"""What the training loop does after which steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from oktopk.lab.train.loop import _is_histogram_due
from oktopk.lab.train.setup import Progress


def test_snapshots_of_parameters_are_of_the_latest_phase_too():
    """A text run has one epoch of thousands of steps: its end is not that of the epoch."""
    config = SimpleNamespace(histogram_every=0, max_steps=280, max_minutes=0.0)
    progress = Progress()
    run: Any = SimpleNamespace(
        config=config, progress=progress, steps_per_epoch=10_000, warmup_steps=30, target=None
    )
    due = []
    for _ in range(config.max_steps):
        progress.step, progress.index = progress.step + 1, progress.index + 1
        if _is_histogram_due(run):
            due.append(progress.step)
    assert due == [1, 2, 4, 8, 16, 30, 31, 32, 64, 128, 256, 280]
