# SPDX-License-Identifier: Apache-2.0
"""A rank lost outside of the exchange: the others name it, whatever they were waiting in."""

from __future__ import annotations

import re

import pytest

import lost
from worlds import forkserver

slow = pytest.mark.slow


def ended(corpus, tmp_path, port: int, where: str, how: str, *differing: dict) -> list[str]:
    """What three ranks said; all but the one that was to be lost must end by themselves."""
    files = [tmp_path / f"rank{rank}" for rank in range(3)]
    processes = []
    for rank, file in enumerate(files):
        settings = {"data": corpus, "runs": str(tmp_path / "runs"), "epochs": 1}
        settings |= differing[rank] if differing else {}
        process = forkserver().Process(
            target=lost.main, args=(rank, 3, port, settings, where, how, str(file))
        )
        process.start()
        processes.append(process)
    try:
        for process in processes[: 2 if how == "stops" else 3]:
            process.join(60)
        said = [file.read_text() for file in files]
        assert all(process.exitcode for process in processes[:2]), said
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    return said


@pytest.mark.parametrize(
    ("where", "how"),
    [
        pytest.param("set-up", "dies", marks=slow),
        pytest.param("DDP's own collectives", "dies", marks=slow),
        pytest.param("bucket rebuild", "dies", marks=slow),
        ("validation", "dies"),
        pytest.param("validation", "stops", marks=slow),
        pytest.param("checkpoint", "dies", marks=slow),
    ],
)
def test_the_lost_rank_is_named(corpus, tmp_path, free_port, where, how):
    for rank, text in enumerate(ended(corpus, tmp_path, free_port, where, how)[:2]):
        last = text.strip().splitlines()[-1]
        assert re.match(
            rf"ExchangeError: rank {rank}, step \d+: rank 2 does not answer: it died, stopped, or "
            r"ended before the others \(",
            last,
        ), text
        assert "Traceback" not in text, text
        assert "rank 1 does not" not in text and "rank 0 does not" not in text, text


def test_a_rank_that_fails_outside_of_steps_tells_the_others_why(corpus, tmp_path, free_port):
    said = ended(corpus, tmp_path, free_port, "set-up", "breaks")
    for rank, text in enumerate(said[:2]):
        why = r"rank 2 failed in step \d+: ValueError: it broke here"
        assert re.search(rf"ExchangeError: rank {rank}, step \d+: {why}", text), text
    assert "ValueError: it broke here" in said[2]


def test_ranks_that_were_started_differently_say_so_and_end(corpus, tmp_path, free_port):
    flags = [{}, {"lr": 0.02, "clip_after": 1.0}, {"cache": str(tmp_path / "own")}]
    for text in ended(corpus, tmp_path, free_port, "", "", *flags):
        assert text.strip().splitlines() == [
            "LaunchError: the ranks were started with different settings: lr is 0.01 on ranks 0, 2 "
            "but 0.02 on rank 1; clip_after is 400.0 on ranks 0, 2 but 1.0 on rank 1. Give all "
            "ranks the same flags"
        ]
    assert not (tmp_path / "runs").exists()
