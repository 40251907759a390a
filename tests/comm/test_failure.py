"""A rank that dies, stops or fails alone: the others name it within the timeout, and end."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import contextmanager

import pytest

import endless
from oktopk.comm.failure_detector import LOST, verdict_on
from worlds import forkserver

SIZE = 4
PHASES = {"dense": 10**6, "sparse": 0}  # warm-up steps


@contextmanager
def training(folder, *, timeout: float, warmup: int, meeting: str = "", odd: str = ""):
    """Four ranks in the middle of training, rank 1 maybe odd, and the files with what they say."""
    context = forkserver()
    attached = {"density": 0.05, "warmup_steps": warmup, "timeout": timeout}
    meeting = meeting or f"file://{folder}/meet"
    files = [folder / str(rank) for rank in range(SIZE)]
    ranks = [
        context.Process(
            target=endless.into_file,
            args=(str(files[rank]), rank, SIZE, meeting, attached, 10**9, odd if rank == 1 else ""),
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


def last_words(ranks, files, victim: int) -> list[str]:
    """What the living said when they ended, with a failure and by themselves."""
    said = []
    for rank, process in enumerate(ranks):
        if rank != victim:
            process.join(40)
            text = files[rank].read_text()
            assert process.exitcode not in (0, None), text
            assert re.search(rf"rank {rank}, step \d+: ", text), text[-2000:]
            said.append(text)
    return said


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_living_name_the_dead(tmp_path, blow, phase):
    with training(tmp_path, timeout=6.0, warmup=PHASES[phase]) as (ranks, files):
        os.kill(ranks[2].pid, blow)
        for text in last_words(ranks, files, 2):
            assert re.search(r"step \d+: rank 2 does not answer: it died, stopped", text), text
            assert len(set(re.findall(r"rank (\d) does not answer", text))) == 1, text


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_fails_alone_tells_the_others_why(tmp_path, phase):
    """At once: nobody waits for the timeout, which is longer than this test."""
    with training(tmp_path, timeout=300, warmup=PHASES[phase], odd="breaks") as (ranks, files):
        for text in last_words(ranks, files, 1):
            assert "rank 1 failed in step 20: TypeError: 'NoneType'" in text, text
        ranks[1].join(40)
        assert "TypeError: 'NoneType'" in files[1].read_text()


def test_a_rank_that_is_only_late_is_not_called_dead(tmp_path):
    with training(tmp_path, timeout=6.0, warmup=0, odd="sleeps") as (ranks, files):
        for text in last_words(ranks, files, 1):
            assert "all ranks answer, the last of them rank 1 in step 19: a rank came" in text, text


def test_when_the_store_died_too_the_living_say_so(tmp_path, free_port):
    meeting = f"tcp://127.0.0.1:{free_port}"
    with training(tmp_path, timeout=6.0, warmup=0, meeting=meeting) as (ranks, files):
        os.kill(ranks[0].pid, signal.SIGKILL)
        for text in last_words(ranks, files, 0):
            assert LOST in text, text


def test_when_the_store_stopped_too_the_living_say_so(tmp_path, free_port):
    meeting = f"tcp://127.0.0.1:{free_port}"
    with training(tmp_path, timeout=6.0, warmup=10**6, meeting=meeting) as (ranks, files):
        os.kill(ranks[0].pid, signal.SIGSTOP)
        for text in last_words(ranks, files, 0):
            assert LOST in text, text


def test_the_verdict():
    fine = {"step": 5, "cause": None}
    broken = {"step": 7, "cause": "ValueError: x"}
    assert verdict_on({0: fine, 1: broken}, 2) == "rank 1 failed in step 7: ValueError: x"
    assert verdict_on({0: fine, 3: fine}, 4).count("does not answer") == 2
    assert "the last of them rank 1 in step 4" in verdict_on({0: fine, 1: {**fine, "step": 4}}, 2)
