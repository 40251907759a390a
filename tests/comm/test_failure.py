# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, stops or fails alone: the others name it within the timeout, and end."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import contextmanager

import pytest

import endless
from oktopk.comm.failure import STORE_UNREACHABLE
from worlds import forkserver

SIZE = 4
# arguments of `attach`, or of `local_steps`
PHASES = {
    "dense": {"warmup_steps": 10**6},
    "sparse": {"warmup_steps": 0},
    "local steps": {"every": 1},
}


@contextmanager
def training(folder, *, timeout: float, more: dict, init_method: str = "", odd: str = ""):
    """Four ranks in the middle of training, rank 1 maybe odd, and the files with what they say."""
    context = forkserver()
    attached = {"density": 0.05, "timeout": timeout, **more}
    init_method = init_method or f"file://{folder}/store"
    files = [folder / str(rank) for rank in range(SIZE)]
    ranks = [
        context.Process(
            target=endless.into_file,
            args=(
                str(files[rank]),
                rank,
                SIZE,
                init_method,
                attached,
                10**9,
                odd if rank == 1 else "",
            ),
        )
        for rank in range(SIZE)
    ]
    for process in ranks:
        process.start()
    try:
        deadline = time.monotonic() + 40
        while not all(file.exists() and "ten steps" in file.read_text() for file in files):
            assert time.monotonic() < deadline, [file.read_text()[-500:] for file in files]
            time.sleep(0.05)
        yield ranks, files
    finally:
        for process in ranks:
            process.kill()
            process.join()


def output_of_others(ranks, files, victim: int) -> list[str]:
    """What the other ranks printed when they ended, by themselves and with an error."""
    texts = []
    for rank, process in enumerate(ranks):
        if rank != victim:
            process.join(40)
            text = files[rank].read_text()
            assert process.exitcode not in (0, None), text
            assert re.search(rf"rank {rank}, step \d+: ", text), text[-2000:]
            texts.append(text)
    return texts


BLOWS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
ALWAYS = ("killed-sparse", "stopped-dense")  # the others are slow
LOSSES = [
    pytest.param(
        blow,
        phase,
        id=f"{how}-{phase}",
        marks=[] if f"{how}-{phase}" in ALWAYS else pytest.mark.slow,
    )
    for how, blow in BLOWS.items()
    for phase in PHASES
]


@pytest.mark.parametrize(("blow", "phase"), LOSSES)
def test_the_other_ranks_name_the_lost_one(tmp_path, blow, phase):
    with training(tmp_path, timeout=6.0, more=PHASES[phase]) as (ranks, files):
        os.kill(ranks[2].pid, blow)
        for text in output_of_others(ranks, files, 2):
            assert re.search(r"step \d+: rank 2 does not answer: it died, stopped", text), text
            assert len(set(re.findall(r"rank (\d) does not answer", text))) == 1, text


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_fails_alone_tells_the_others_why(tmp_path, phase):
    """At once: nobody waits for the timeout, which is longer than this test."""
    with training(tmp_path, timeout=300, more=PHASES[phase], odd="breaks") as (ranks, files):
        for text in output_of_others(ranks, files, 1):
            assert "rank 1 failed in step 20: TypeError: 'NoneType'" in text, text
        ranks[1].join(40)
        assert "TypeError: 'NoneType'" in files[1].read_text()


def test_a_rank_that_is_only_late_is_not_reported_as_lost(tmp_path):
    with training(tmp_path, timeout=6.0, more=PHASES["sparse"], odd="sleeps") as (ranks, files):
        for text in output_of_others(ranks, files, 1):
            assert "all ranks answer, the last of them rank 1 in step 19: a rank was" in text, text


def test_without_a_store_the_other_ranks_say_so(tmp_path, free_port):
    init_method = f"tcp://127.0.0.1:{free_port}"
    with training(tmp_path, timeout=6.0, more=PHASES["sparse"], init_method=init_method) as (
        ranks,
        files,
    ):
        os.kill(ranks[0].pid, signal.SIGKILL)
        for text in output_of_others(ranks, files, 0):
            assert STORE_UNREACHABLE in text, text


def test_with_a_stopped_store_the_other_ranks_say_so(tmp_path, free_port):
    init_method = f"tcp://127.0.0.1:{free_port}"
    with training(tmp_path, timeout=6.0, more=PHASES["dense"], init_method=init_method) as (
        ranks,
        files,
    ):
        os.kill(ranks[0].pid, signal.SIGSTOP)
        for text in output_of_others(ranks, files, 0):
            assert STORE_UNREACHABLE in text, text
