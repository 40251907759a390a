# SPDX-License-Identifier: Apache-2.0
"""A short form of `make torture` with a fixed seed, and whether its judges see what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from torture import faults, feeding, odd, processes, verdicts, world
from torture.desk import Input, LostError
from torture.trial import STEPS, Trial

ROOT = Path(__file__).parents[2]

# the quick ones: faults that end without waiting for a time-out, with few runs each
KINDS = "kill,weights,settings,nan,raise-on-step,inputs"


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> dict:
    """The sums of a short run, by part; it fails, with the report, if it does not end by itself."""
    out = tmp_path_factory.mktemp("torture")
    command = [sys.executable, "-m", "torture", "--only", KINDS, "--seed", "20", "--out", str(out)]
    command += ["--faults", "10", "--inputs", "500", "--jobs", "2", "--minutes", "2"]
    known = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": known}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    rows = json.loads((out / "torture.json").read_text())["table"]
    sums = {part: verdicts.total(rows, part) for part in ("faults", "inputs")}
    return sums | {"report": (out / "torture.md").read_text()}


@pytest.mark.parametrize(("part", "least"), [("faults", 10), ("inputs", 500)])
def test_a_short_torture_finds_nothing(table, part, least):
    assert table[part]["trials"] == least
    assert not any(table[part][column] for column in verdicts.COLUMNS), table["report"]


def ended(code, said="", weights="same"):
    steps = [{"step": 0, "weights": weights}]
    return world.Ended(code, said, {"steps": steps, "odd": [], "planted": [], "end": []})


@pytest.mark.parametrize(
    ("end", "column"),
    [
        (ended(1, "oktopk.ExchangeError: rank 0, step 3: rank 1 does not answer"), ""),
        (ended(1, "oktopk.ExchangeError: rank 0, step 3: rank 2 does not answer"), "unclear"),
        (ended(1, "RuntimeError: rank 1 does not answer; rank 2 does not answer"), "unclear"),
        (ended(1, "RuntimeError: Connection closed by peer"), "unclear"),
        (ended(1), "unclear"),
        (ended(-6, "terminate called: rank 1"), "unclear"),
        (ended(0), "difference"),
        (ended(None), "hang"),
    ],
)
def test_a_survivor_must_name_the_one_that_died(end, column):
    found = {one.column for one in world.failed_clearly([end, ended(-9)], victim=1)}
    assert found == ({column} if column else set())


def test_other_bits_and_runs_that_do_not_finish_are_seen():
    reference = [ended(0), ended(0)]
    assert not world.finished_alike([ended(0), ended(0)], reference)
    found = world.finished_alike([ended(0, weights="other"), ended(1)], reference)
    assert {one.column for one in found} == {"difference", "lost"}


def test_a_difference_says_from_which_step_on():
    steps = [{"step": step, "weights": "same"} for step in range(3)]
    one, other = (world.Ended(0, "", {"steps": list(steps)}) for _ in range(2))
    one.notes["steps"][1:] = [{"step": step, "weights": "other"} for step in (1, 2)]
    [found] = world.finished_alike([one], [other])
    assert found.column == "difference" and "from step 1 on" in found.text


@pytest.mark.parametrize(("code", "column"), [(1, "lost"), (None, "hang")])
def test_a_reference_that_did_not_finish_is_no_difference(monkeypatch, tmp_path, code, column):
    """Both runs of a trial with a NaN are judged, the one that the other is compared with too."""
    skipped = [{"step": step, "weights": "same", "skipped": 1} for step in range(STEPS)]
    finished = world.Ended(0, "", {"steps": skipped})
    failed = world.Ended(code, "ExchangeError: late", {"steps": []})
    runs = iter([[finished] * 3, [failed] * 3])
    monkeypatch.setattr(world, "run", lambda jobs: next(runs))
    found = faults.KINDS["nan"](Trial(Random("nan/28"), tmp_path))
    assert {one.column for one in found} == {column}


class OneAtATime:
    """Stands for a process of multiprocessing, and counts the threads that use any of them."""

    inside = most = 0
    pid = 1

    def use(self) -> int:
        OneAtATime.inside += 1
        OneAtATime.most = max(OneAtATime.most, OneAtATime.inside)
        time.sleep(0.002)  # long enough for another thread to come in
        OneAtATime.inside -= 1
        return 0

    start = kill = use
    exitcode = property(use)


def test_threads_with_processes_use_multiprocessing_one_at_a_time(monkeypatch):
    """Else two threads read an exit code at the same time, and one of them gets 255."""
    context = SimpleNamespace(Process=lambda **_: OneAtATime())
    monkeypatch.setattr(processes, "forkserver", lambda: context)

    def use(_) -> int | None:
        child = processes.Child(int)
        child.start()
        child.join(1)
        child.kill()
        return child.exitcode

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(use, range(8))) == {0}
    assert OneAtATime.most == 1


@pytest.mark.parametrize(
    ("error", "column"),
    [
        (ValueError("lr must be positive, got -1"), None),
        (ValueError("out of range"), "unclear"),
        (KeyError("lr"), "unclear"),
        (RecursionError("lr"), "unclear"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid start byte"), "unclear"),
        (MemoryError(), "hang"),
        (feeding.TookTooLongError(), "hang"),
        (LostError("the state was changed"), "lost"),
        (SystemExit(2), "unclear"),
        (SystemExit("oktopk: lr must be positive"), None),
        (SystemExit("Traceback (most recent call last): lr"), "unclear"),
    ],
)
def test_an_input_must_be_refused_in_words(error, column):
    wrong = feeding.complaint(error, Input("odd", lambda: None, (ValueError,), ("lr",)), "")
    assert (wrong and wrong[0]) == column


def test_the_same_seed_draws_the_same_input():
    tree = {"a": [1, {"b": 2.0}], "c": "text"}
    for seed in range(50):
        assert repr(odd.changed(Random(seed), tree)) == repr(odd.changed(Random(seed), tree))
        assert odd.spoilt(Random(seed), b"x" * 99) == odd.spoilt(Random(seed), b"x" * 99)
    assert tree == {"a": [1, {"b": 2.0}], "c": "text"}


def test_the_table_counts_trials_not_findings():
    two = (verdicts.Finding("hang", "a"), verdicts.Finding("hang", "b"))
    results = [
        verdicts.Result("kill", 1, "faults", "", two),
        verdicts.Result("kill", 2, "faults", ""),
    ]
    [row] = verdicts.rows_of(results)
    assert (row["trials"], row["hang"], row["lost"]) == (2, 1, 0)
    assert "python -m torture --only kill --seed 1" in verdicts.markdown(results)
