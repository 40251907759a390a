"""The convergence bench: that it runs, resumes and reckons rightly. Never how well it learns."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the bench reads scikit-learn's digits")
pytest.importorskip("matplotlib", reason="the bench draws pictures")

BENCH = Path(__file__).parents[2] / "benchmarks" / "convergence"
sys.path.insert(0, str(BENCH))

import summary  # noqa: E402
from record import Key, Record, arguments, read  # noqa: E402


def bench(folder: Path, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCH), "--folder", str(folder), "--workers", "2", *more]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def record(setting: str, curve: list, seed: int = 0, **more) -> Record:
    key = Key(task="t", optimizer="o", setting=setting, seed=seed, workers=4, steps=0)
    return Record(key=key, measure="m", higher_is_better=False, curve=curve, **more)


def test_it_trains_what_is_missing_and_no_more(tmp_path):
    small = ["--tasks", "digits", "--optimizers", "adamw", "--seeds", "0", "--steps", "8"]
    first = bench(tmp_path, *small, "--settings", "dense")
    assert first.returncode == 0, first.stderr
    again = bench(tmp_path, *small, "--settings", "dense", "auto,warmup_steps=2,ramp_steps=2")
    assert again.returncode == 0, again.stderr
    assert "Warning" not in first.stderr + again.stderr
    assert [said.stdout.count("% of the bytes") for said in (first, again)] == [1, 1]
    assert (tmp_path / "digits-8steps-2workers-adamw.png").stat().st_size > 5000
    records = {r.key.setting: r for r in map(read, tmp_path.glob("*.json"))}
    assert set(records) == {"dense", "auto,warmup_steps=2,ramp_steps=2"}
    assert records["dense"].share == 1
    assert records["auto,warmup_steps=2,ramp_steps=2"].share < 0.9
    assert [step for step, _, _ in records["dense"].curve] == list(range(1, 9))


def test_an_unknown_task_is_named(tmp_path):
    said = bench(tmp_path, "--tasks", "digit")
    assert said.returncode == 2
    assert "digits, chars, spoken, an4" in said.stderr


def test_an_unknown_setting_is_named(tmp_path):
    said = bench(tmp_path, "--settings", "dense", "densse")
    assert said.returncode == 2
    assert "dense, plain, auto, got 'densse'" in said.stderr


@pytest.mark.slow
def test_a_failed_run_does_not_lose_the_others(tmp_path):
    small = ["--tasks", "digits", "--optimizers", "sgd", "--seeds", "0", "--steps", "4"]
    said = bench(tmp_path, *small, "--settings", "plain,density=7", "dense")
    assert said.returncode == 1
    assert "density must be in (0, 1], got 7" in said.stderr and "failed: " in said.stderr
    assert "| digits, 4 steps, 2 workers | sgd | dense |" in said.stdout


def test_the_distance_and_the_pace():
    dense = [(10, 4.0, 100), (20, 3.0, 200), (30, 2.0, 300), (40, 1.0, 400)]
    slow = [(10, 6.0, 10), (20, 4.0, 20), (30, 3.0, 30), (40, 1.5, 40)]
    groups = summary.grouped(
        [record("dense", dense, dense_bytes=400), record("slow", slow, dense_bytes=400)]
    )
    first, second = summary.rows(groups["t", "o"])
    assert (first.distance, first.pace, first.share) == (0, 1, 1)
    assert second.distance == 0.5 and second.share == 0.1
    assert second.pace == pytest.approx(30 / (30 + 10 * (3 - 2) / (3 - 1.5)))
    row = "| t | o | slow | 1 | m | 1.5000 | 0.0000 | +50.0% | 82% | never | 0.00 | 10.0% |"
    assert row in summary.table(groups)
    assert (first.caught_up, second.caught_up) == (40, None)


def test_what_is_never_reached_has_no_pace():
    dense = [(1, 2.0, 1), (2, 1.0, 2)]
    assert summary.pace([(1, 5.0, 1), (2, 4.0, 1)], dense, 1) is None
    assert summary.pace([(1, 0.5, 1), (2, 0.4, 1)], dense, 1) == 2


def test_seeds_are_averaged():
    both = [record("dense", [(1, 1.0, 10)]), record("dense", [(1, 3.0, 20)], seed=1)]
    (row,) = summary.rows(summary.grouped(both)["t", "o"])
    assert (row.final, row.spread, row.seeds) == (2.0, 2.0, 2)


def test_settings_are_compared_over_equal_seeds_steps_and_workers():
    dense = [record("dense", [(1, 1.0, 10)]), record("dense", [(1, 3.0, 20)], seed=1)]
    other = record("auto", [(1, 3.0, 20)], seed=1)
    longer = Record(key=replace(other.key, steps=7), measure="m", higher_is_better=False, curve=[])
    groups = summary.grouped([*dense, other, longer])
    rows = {row.setting: row for row in summary.rows(groups["t", "o"])}
    assert rows["auto"].distance == 0  # dense with seed 1 ended there too
    assert set(groups) == {("t", "o"), ("t, 7 steps", "o")}


def test_a_setting_may_have_arguments():
    assert arguments("auto,density=0.01") == ("auto", {"density": "0.01"})
    assert arguments("dense") == ("dense", {})
