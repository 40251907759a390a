# SPDX-License-Identifier: Apache-2.0
"""Races: when a run reached the target, how much sooner than the reference, and the verdict."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import runlogs
from oktopk.lab.compare.compare import RunProgress, _wrapped
from oktopk.lab.compare.plan import setting_name
from oktopk.lab.compare.results import arrival, row, verdict, where_time_went, write_tables
from oktopk.lab.runlog.reader import read_runlog
from oktopk.lab.tasks.base import Metric
from oktopk.lab.train.config import make_config
from oktopk.lab.train.setup import Target

TARGET = Target(Metric("wer", "WER"), 0.5)


def store(
    folder: Path, method: str, wer: float, seconds: float, network: str = "", seed: int = 0
) -> Path:
    """A run of two validations, after step 4 and step 8, which took so many seconds each."""
    entries = runlogs.whole_run(wer=wer)
    for entry in entries:
        if entry["kind"] == "validation":
            entry["seconds"] = seconds * (entry["step"] + 1) / 4
        if entry["kind"] == "run":
            entry["network"] = network or None
    name = setting_name(method, 0.02, seed, 1)
    return runlogs.write(folder / name, entries, make_config(name=name, method=method, seed=seed))


def test_a_run_arrives_with_its_first_validation_that_is_good_enough(tmp_path):
    fast, slow = (
        read_runlog(store(tmp_path, m, w, 10.0)) for m, w in (("oktopk", 0.2), ("topka", 0.5))
    )
    assert arrival(fast, TARGET).seconds == 10.0 and arrival(fast, TARGET).steps == 4
    assert arrival(slow, TARGET).seconds == 20.0 and arrival(slow, TARGET).steps == 8
    assert arrival(fast, TARGET).bytes_sent == 440  # 2 dense steps of 100 and 2 of 10, 2 ranks
    assert arrival(slow, Target(Metric("wer"), 0.4)) is None
    assert row(slow).arrival is None  # without a target


def test_the_table_says_how_much_sooner_than_ddp(tmp_path):
    store(tmp_path, "ddp_dense", 0.5, 30.0, "100mbit")
    store(tmp_path, "oktopk", 0.25, 10.0, "100mbit")
    store(tmp_path, "topka", 0.9, 10.0, "100mbit")
    said = write_tables(tmp_path, "wer", TARGET)
    rows = {one["setting"]: one for one in json.loads((tmp_path / "table.json").read_text())}
    assert rows["oktopk-0.02"]["speedup"] == pytest.approx(6)
    assert rows["topka-0.02"]["arrival"] is None and rows["topka-0.02"]["speedup"] is None
    assert list(rows) == ["ddp_dense", "oktopk-0.02", "topka-0.02"]
    assert (
        "oktopk-0.02 reached WER <= 0.5 at 100mbit first, after 0:10 of training and 440 B; "
        "ddp_dense took 1:00 and 520 B: 6.0 times sooner, with 1.2 times fewer bytes."
    ) in said
    assert "| oktopk-0.02 |      0:10 |      6.0 |" in (tmp_path / "table.md").read_text()
    page = (tmp_path / "compare.html").read_text()
    assert "reached WER &lt;= 0.5 at 100mbit first" in page and "target: WER" in page


def test_several_seeds_of_a_setting_are_one_row_with_their_mean_and_spread(tmp_path):
    for seed, wer in enumerate((0.4, 0.3, 0.5)):
        store(tmp_path, "ddp_dense", wer, 30.0, seed=seed)
        store(tmp_path, "oktopk", wer - 0.1, 10.0, seed=seed)
        store(tmp_path, "topka", wer + 0.15, 10.0, seed=seed)
    said = write_tables(tmp_path, "wer", TARGET)
    head, _, *rows = (tmp_path / "seeds.md").read_text().splitlines()
    cells = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in rows
    }
    names = [c.strip() for c in head.split("|")[1:-1]]
    assert names == [
        "setting", "seeds", "reached", "to target", "speed-up", "sent to target", "WER",
        "lowest to highest",
    ]  # fmt: skip
    assert cells["ddp_dense"] == ["3", "3 of 3", "1:00", "-", "520 B", "0.400", "0.300 to 0.500"]
    assert cells["oktopk-0.02"][:4] == ["3", "3 of 3", "0:17", "3.6"]
    assert cells["topka-0.02"][:4] == ["3", "1 of 3", "-", "-"]  # a mean of some would be too low
    assert "means of all seeds:" in said and "0.300 to 0.500" in said
    assert "seeds.md, table.md, table.json, compare.html" in said
    assert "lowest to highest" in (tmp_path / "compare.html").read_text()


def test_the_conclusion_is_about_means_and_not_about_the_luckiest_run(tmp_path):
    for seed, seconds in enumerate((10.0, 40.0, 50.0)):
        store(tmp_path, "ddp_dense", 0.5, 30.0, seed=seed)
        store(tmp_path, "oktopk", 0.3 if seed == 0 else 0.45, seconds, seed=seed)
    said = write_tables(tmp_path, "wer", TARGET)
    assert "oktopk-0.02 reached WER <= 0.5 first" not in said
    assert "ddp_dense reached WER <= 0.5 first, after 1:00 of training" in said
    assert "These are means of all seeds." in said
    said = write_tables(tmp_path, "wer", None)
    assert "oktopk-0.02 ended with WER 0.400, and ddp_dense with 0.500" in said
    page = (tmp_path / "compare.html").read_text()
    assert "Means of all finished seeds of each setting:" in page


def test_only_finished_seeds_count(tmp_path):
    for seed, wer in enumerate((0.4, 0.5)):
        store(tmp_path, "ddp_dense", wer, 30.0, seed=seed)
        store(tmp_path, "oktopk", wer, 30.0, seed=seed)
    path = store(tmp_path, "oktopk", 0.9, 30.0, seed=2) / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # it was killed
    write_tables(tmp_path, "wer", TARGET)
    row = next(r for r in (tmp_path / "seeds.md").read_text().splitlines() if "oktopk" in r)
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert (cells[1], cells[-2], cells[-1]) == ("2", "0.450", "0.400 to 0.500")


def test_rows_of_a_table_are_not_wrapped(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    row, sentence = f"setting{'  wide' * 9}", "a sentence that is wider than the terminal is"
    assert _wrapped(f"{row}\n{sentence}").splitlines()[0] == row
    assert len(_wrapped(f"{row}\n{sentence}").splitlines()) == 3


def test_one_seed_has_no_table_of_seeds(tmp_path):
    store(tmp_path, "ddp_dense", 0.5, 30.0)
    store(tmp_path, "oktopk", 0.25, 10.0)
    assert "seeds" not in write_tables(tmp_path, "wer", TARGET)
    assert not (tmp_path / "seeds.md").exists()


def verdict_of(tmp_path, *runs: tuple[str, float, float]) -> str:
    runlogs_ = [read_runlog(store(tmp_path, *run)) for run in runs]
    return verdict(runlogs_, [row(one, TARGET) for one in runlogs_], TARGET)


def test_a_reference_that_did_not_arrive_is_said(tmp_path):
    said = verdict_of(tmp_path, ("ddp_dense", 0.9, 30.0), ("oktopk", 0.2, 5.0))
    assert said == (
        "oktopk-0.02 reached WER <= 0.5 first, after 0:05 of training and 440 B; ddp_dense did not "
        "reach it in 0.8 s and 520 B."
    )


def test_nobody_arrived_and_the_reference_won(tmp_path):
    said = verdict_of(tmp_path, ("ddp_dense", 0.9, 3.0), ("oktopk", 0.9, 5.0))
    assert said == "No run reached WER <= 0.5."
    said = verdict_of(tmp_path / "b", ("ddp_dense", 0.2, 3.0), ("oktopk", 0.2, 5.0))
    assert said.startswith("ddp_dense reached WER <= 0.5 first") and "sooner" not in said
    assert verdict([], [], TARGET) == "" and verdict([], [], None) == ""


def test_where_the_time_went_adds_up(tmp_path):
    (figure,) = where_time_went([read_runlog(store(tmp_path, "oktopk", 0.5, 1.0))])
    assert [trace["name"] for trace in figure.traces][3] == "exposed"
    total = sum(trace["x"][0] for trace in figure.traces)
    assert total == pytest.approx(8 * sum(runlogs.SECONDS.values()))


def test_progress_says_how_far_a_run_is_and_how_long_it_may_take():
    config = make_config(name="a", until="wer<0.1", max_minutes=0.01)
    progress = RunProgress("1/2 a", config, 1)
    assert progress.line() == "1/2 a: starting"
    assert progress(runlogs.records(runlogs.whole_run(wer=0.5)[:7])) is False
    assert progress.line() == (
        "1/2 a: step 4 of 8, WER 1.000, 0.4 s of training, at most 0.2 s left, 1 more to train "
        "(at most 0.8 s in all)"
    )


def test_progress_counts_a_resumed_run_once():
    """Its file is written again from the last checkpoint, and read again from the beginning."""
    progress = RunProgress("1/1 a", make_config(name="a"), 0)
    entries = runlogs.records(runlogs.whole_run()[:7])
    progress(entries)
    once = progress.line()
    progress(entries)
    assert progress.line() == once and "0.4 s of training" in once
    progress(runlogs.records([runlogs.opening() | {"step": 4}, runlogs.step(4)]))
    assert "step 5 of 8, WER 1.000, 0.5 s of training" in progress.line()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_line_of_a_terminal_is_one_line(monkeypatch, capsys, error):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with suppress(KeyboardInterrupt), RunProgress("1/1 a", make_config(name="a"), 3) as progress:
        progress(runlogs.records(runlogs.whole_run()[:7]))
        if error:
            raise error
    shown = "1/1 a: step 4 of 8, WER 1.000, 0.4 s of"
    after = "\n" if error else f"\r{' ' * len(shown)}\r"
    assert capsys.readouterr().out == f"\r{shown}{after}" and len(shown) == 39
