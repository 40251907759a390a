# SPDX-License-Identifier: Apache-2.0
"""The examples, run as their docstrings say, with the real packages and two processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the examples read scikit-learn's digits")

ROOT = Path(__file__).parents[2]
# standalone: any free port, so that two runs of the tests do not meet on torchrun's usual one
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# example -> (the package it needs, what starts it)
EXAMPLES = {
    "torchrun_digits.py": ("torch", TORCHRUN),
    "accelerate_digits.py": ("accelerate", TORCHRUN),
    "lightning_digits.py": ("lightning", ()),
    "local_steps_text.py": ("torch", TORCHRUN),
    "fsdp2_text.py": ("torch", (*TORCHRUN[:-1], "4")),
}
SAID = re.compile(
    r"accuracy ([\d.]+) after (\d+) steps\n"
    r"bytes sent ([\d,]+) of ([\d,]+) dense; sparse from step (\d+)\n"
)
# Lightning writes its warnings without the word "Warning"
WARNING = re.compile(r"warn|deprecat|does not have many workers|/site-packages/\S+\.py:\d+:", re.I)
TOLERATED = (
    # Lightning 2.6 builds a LeafSpec for every batch, which torch 2.13 deprecates
    re.compile(r"lightning/pytorch/utilities/_pytree\.py:\d+: `isinstance\(treespec, LeafSpec\)`"),
    # Lightning wants loader workers on machines with many cores; for 1,437 tiny images they only
    # cost time
    re.compile(r"The 'train_dataloader' does not have many workers"),
)


def run(script: str, launcher: tuple[str, ...]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr. What does not end by itself is ended, workers included."""
    command = [sys.executable, *launcher, str(ROOT / "examples" / script)]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    # one thread per process, as the docstrings say; loopback, for machines whose name is unknown
    extra = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command,
        env=os.environ | extra,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            stdout, stderr = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun's workers have sessions of their own
            time.sleep(5)
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, stdout, stderr


def warnings_in(stderr: str) -> list[str]:
    lines = [line for line in stderr.splitlines() if WARNING.search(line)]
    return [line for line in lines if not any(known.search(line) for known in TOLERATED)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "script",
    [
        "torchrun_digits.py",
        pytest.param("accelerate_digits.py", marks=pytest.mark.slow),  # docs/guides has one too
        pytest.param("lightning_digits.py", marks=pytest.mark.slow),
    ],
)
def test_example_learns_and_saves_traffic(script):
    package, launcher = EXAMPLES[script]
    pytest.importorskip(package, reason=f"{script} needs {package}")
    code, stdout, stderr = run(script, launcher)
    assert code == 0, stderr
    said = SAID.fullmatch(stdout)
    assert said, f"stdout: {stdout}\nstderr: {stderr}"
    accuracy = float(said[1])
    num_steps, sent, dense, began = (int(text.replace(",", "")) for text in said.groups()[1:])
    assert accuracy > 0.9
    assert 0 < began < num_steps
    # every step after the warm-up sends less than a tenth
    assert sent < dense * (began + 0.1 * (num_steps - began)) / num_steps
    assert not warnings_in(stderr)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_example_of_local_steps_learns_and_saves_traffic():
    code, stdout, stderr = run("local_steps_text.py", TORCHRUN)
    assert code == 0, stderr
    said = re.fullmatch(
        r"loss ([\d.]+) after 300 steps and 30 exchanges\nbytes sent ([\d,]+) of ([\d,]+) dense\n",
        stdout,
    )
    assert said, f"stdout: {stdout}\nstderr: {stderr}"
    sent, dense = (int(text.replace(",", "")) for text in said.groups()[1:])
    assert float(said[1]) < 2.5  # a uniform guess has 5.5, letters by their frequency about 3.4
    assert sent < dense / 100
    assert not warnings_in(stderr)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_example_of_fsdp2_learns_and_saves_traffic():
    code, stdout, stderr = run("fsdp2_text.py", EXAMPLES["fsdp2_text.py"][1])
    assert code == 0, stderr
    said = re.fullmatch(
        r"loss ([\d.]+) after 120 steps\nbytes sent between sites ([\d,]+) of ([\d,]+) dense\n",
        stdout,
    )
    assert said, f"stdout: {stdout}\nstderr: {stderr}"
    sent, dense = (int(text.replace(",", "")) for text in said.groups()[1:])
    assert float(said[1]) < 3.0  # a uniform guess has 5.5, letters by their frequency about 3.4
    assert sent < dense / 3  # 20 of the 120 steps are dense, and 20 more have a falling density
    assert not warnings_in(stderr)


def test_every_example_is_tested():
    """Tasks for `oktopk train` are tested in tests/train/test_task_file.py."""
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"task_regression.py"}
    assert scripts == set(EXAMPLES)
