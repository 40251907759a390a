# SPDX-License-Identifier: Apache-2.0
"""Local workers, without torch in them: `python -m oktopk` finds a script of the test first."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from oktopk.errors import LaunchError
from oktopk.launch import workers as local_workers
from oktopk.launch.ranks import RankEnvironment
from oktopk.launch.workers import num_workers_to_start, run_local_workers


def test_workers_are_started_unless_a_launcher_did():
    assert num_workers_to_start(None, None, 2) == 2
    assert num_workers_to_start(None, 1, 2) == 0, "one needs no other process"
    of_two = RankEnvironment("srun", 0, 2, 0, 2)
    assert num_workers_to_start(of_two, None, 1) == num_workers_to_start(of_two, 2, 1) == 0
    assert num_workers_to_start(RankEnvironment("srun", 0, 1, 0, 1), 4, 1) == 4
    with pytest.raises(LaunchError, match="--workers 4, but this is rank 0 of 2, started by srun"):
        num_workers_to_start(of_two, 4, 1)
    with pytest.raises(LaunchError, match="--workers 0: at least 1"):
        num_workers_to_start(None, 0, 1)


def test_rank_0_writes_to_the_terminal(workers, capfd):
    workers("print('out', rank, *sys.argv[1:]); print('err', rank, file=sys.stderr)")
    assert run_local_workers(3, ["train", "--steps", "5"]) == 0
    said = capfd.readouterr()
    assert (said.out, said.err) == ("out 0 train --steps 5\n", "err 0\n")


def test_the_rank_that_failed_is_shown_in_full_and_the_others_in_a_line(workers, capfd):
    workers(
        "if rank == 2: raise ValueError('the cause')\n"
        "time.sleep(0.3 * (rank == 0))\n"
        "sys.exit(f'trace\\noktopk.comm.ExchangeError: {rank} misses 2')\n"
    )
    assert run_local_workers(3, []) == 1
    said = capfd.readouterr().err
    assert said.startswith("trace\noktopk.comm.ExchangeError: 0 misses 2\nrank 2 | Traceback")
    assert said.endswith(
        "rank 2 | ValueError: the cause\n"
        "rank 1 | oktopk.comm.ExchangeError: 1 misses 2\n"
        "oktopk: rank 2 of 3 ended with exit code 1\n"
    )


def test_what_all_ranks_write_is_shown_once(workers, capfd):
    workers("sys.exit(f'[rank{rank}]: no such data set\\n[W1 socket.cpp] left')")
    assert run_local_workers(3, []) == 1
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "[rank0]: no such data set" and len(said) == 3, said


def test_the_others_end_when_one_is_killed(workers, capfd, monkeypatch):
    """Else this test would run into its time limit."""
    monkeypatch.setattr(local_workers, "AFTER_FAILURE_SECONDS", 0.5)
    workers("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)")
    assert run_local_workers(3, []) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == ("oktopk: rank 1 of 3 was killed by SIGKILL: out of memory?\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_worker_once_as_sigterm(workers, tmp_path, capfd, number):
    """Python answers SIGINT with a traceback until a handler is there, SIGTERM never."""
    workers(
        "def leave(number, _): (folder / f'{rank}.got').open('a').write(f'{number} ')\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, leave)\n"
        "(folder / f'{rank}.ready').touch()\n"
        "while not (folder / f'{rank}.got').exists(): time.sleep(0.01)\n"
        "time.sleep(0.2)\n"
    )

    def interrupt() -> None:
        for _ in range(1000):
            if len(list(tmp_path.glob("*.ready"))) == 2:
                os.kill(os.getpid(), number)
                return
            time.sleep(0.02)

    threading.Thread(target=interrupt).start()
    assert run_local_workers(2, []) == 128 + number
    assert [p.read_text() for p in sorted(tmp_path.glob("*.got"))] == ["15 "] * 2
    name = signal.Signals(number).name
    assert capfd.readouterr().err == (
        f"oktopk: interrupted by {name}; the workers were asked to save and leave\n"
    )
