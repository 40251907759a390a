# SPDX-License-Identifier: Apache-2.0
"""Runs of `oktopk train` for any task, in a folder of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from launchers import environment
from oktopk.lab.train import checkpoint
from oktopk.utils.files import read_tensors

SECONDS = 200
"""For one run; far more than it takes."""


def train(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """`oktopk train` with two workers, started in `folder`."""
    command = [sys.executable, "-m", "oktopk", "train", "--workers", "2", *flags]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def final_state(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of model and optimizer in the last checkpoint of a run, by name."""
    newest = max((run / "checkpoints").glob("step-*"))
    common = read_tensors(newest / checkpoint.COMMON)
    found = dict(common["model"])
    for index, state in common["optimizer"]["state"].items():
        found |= {f"{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    return found


def assert_resumed_alike(folder: Path, *flags: str, steps: int) -> str:
    """Train `steps` steps at once, and again with a stop in the middle: the bits are the same.

    Returns what the first of the runs printed.
    """
    whole = train(folder, *flags, "--name", "whole", "--max-steps", str(steps))
    assert whole.returncode == 0, whole.stderr
    for limit in (steps // 2, steps):
        more = ("--name", "parts", "--max-steps", str(limit), "--resume")
        part = train(folder, *flags, *more)
        assert part.returncode == 0, part.stderr
    assert "resuming from runs/parts/checkpoints/" in part.stderr
    one, other = (final_state(folder / "runs" / name) for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    return whole.stdout
