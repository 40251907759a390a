"""A rank that dies or stops: the others say so within the timeout, and end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SIZE, VICTIM = 4, 2


@pytest.fixture
def ranks(tmp_path, request):
    """Four processes in the middle of training."""
    script = Path(__file__).parent / "endless.py"
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(SIZE), tmp_path / "meet", request.param],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(SIZE)
    ]
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("ranks", "blow"),
    [("100000", signal.SIGKILL), ("0", signal.SIGSTOP)],
    ids=["killed in the dense phase", "stopped in the sparse phase"],
    indirect=["ranks"],
)
def test_the_living_say_what_happened_and_end(ranks, blow):
    for process in ranks:
        assert process.stdout.readline() == "ten steps\n"
    ranks[VICTIM].send_signal(blow)
    said = []
    for rank, process in enumerate(ranks):
        if rank != VICTIM:
            _, stderr = process.communicate(timeout=60)
            assert process.returncode not in (0, None), stderr
            assert re.search(rf"rank {rank}, step \d+: ", stderr), stderr[-2000:]
            said.append(stderr)
    if "dense allreduce" not in said[0]:
        assert any(f"rank {VICTIM}" in text for text in said)
