# SPDX-License-Identifier: Apache-2.0
"""`oktopk watch`: what is shown of a run while another process writes its metrics."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import runlogs
from oktopk.lab import watch
from oktopk.lab.runlog.schema import EpochRecord, PhaseTotals, ProbeRecord, RankMemory
from oktopk.lab.train.recorder import TensorBoardWriter
from oktopk.lab.watch import command, find, others
from oktopk.lab.watch_screen import (
    SILENT_SECONDS,
    RunState,
    RunWatcher,
    rows,
    screen,
    sparkline,
    status,
)


def state_of(entries: list[dict]) -> RunState:
    state = RunState()
    for record in runlogs.records(entries):
        state.update(record)
    return state


def args(run, once: bool = False) -> argparse.Namespace:
    return argparse.Namespace(folder=str(run), once=once, every=0.05)


def test_a_resumed_run_is_counted_once(tmp_path):
    folder = runlogs.write(tmp_path, runlogs.whole_run()[:9])
    watcher = RunWatcher(folder)
    assert watcher.refresh().steps == 6
    runlogs.write(tmp_path, [*runlogs.whole_run()[:4], runlogs.step(3) | {"whole": 0.7}])
    assert watcher.refresh().steps == 4
    assert len(watcher.state.losses) == 4 and watcher.state.validations == []


def test_a_running_run_shows_what_matters():
    entries = runlogs.whole_run(wer=0.25)[:-2]
    warning = {"kind": "warning", "step": 1, "text": "the disk is nearly full"}
    shown = dict(rows(state_of([*entries, warning]), quiet=1.0))
    assert shown["status"] == "running, oktopk at density 0.02, 2 workers"
    assert "100%, step 8 of 8, sparse phase" in shown["progress"]
    assert shown["loss"].endswith(" 2.250")
    assert "WER 0.500, CER 0.250, validation loss 5.000 after step 4" in shown["validation"]
    # 2 dense steps of 100, 6 sparse ones of 10
    assert shown["sent"] == "260 B by worker 0 for 800 B dense, 68% saved; sparse phase 10.0x less"
    assert shown["time"].startswith("100 ms a step: data 10%, forward 20%, backward 30%")
    assert shown["warning"] == "the disk is nearly full"


def test_the_time_left_follows_the_last_steps():
    entries = [runlogs.opening(total=100), *(runlogs.step(i) for i in range(40))]
    assert "40%, step 40 of 100" in dict(rows(state_of(entries), 0.0))["progress"]
    assert "about 0:06 left" in dict(rows(state_of(entries), 0.0))["progress"]


@pytest.mark.parametrize(
    ("entries", "quiet", "word", "text"),
    [
        ([], 0.0, "waiting", "waiting for the run to begin"),
        ([runlogs.opening()], 1.0, "running", "running, oktopk at density 0.02, 2 workers"),
        ([runlogs.opening(method="dense")], 1.0, "running", "running, dense, 2 workers"),
        (
            [runlogs.opening(), runlogs.step(0)],
            SILENT_SECONDS + 1,
            "silent",
            "nothing was recorded for 2:01",
        ),
        ([runlogs.step(0), runlogs.end("failed", "no disk")], 900.0, "failed", "failed: no disk"),
        ([runlogs.step(0), runlogs.end()], 900.0, "finished", "finished"),
    ],
)
def test_a_status_for_every_fate(entries, quiet, word, text):
    seen = state_of(entries)
    assert status(seen, quiet) == word
    assert dict(rows(seen, quiet))["status"].startswith(text)
    screen(seen, "runs/x", quiet)


def test_a_journal_of_ones_own_training_is_enough():
    """What docs/guides/reports.md asks for: the fields of StepStats, and nothing else."""
    import torch

    import oktopk

    reducer = oktopk.Reducer(1000, density=0.02, warmup_steps=1)
    stats = [reducer.reduce_(torch.randn(1000)).as_dict() for _ in range(3)]
    shown = dict(rows(state_of([{"kind": "step"} | step for step in stats]), 0.0))
    assert shown["progress"] == "step 3, sparse phase" and "loss" not in shown


def test_skipped_steps_and_many_warnings_do_not_crowd_the_view():
    warnings = [{"kind": "warning", "text": f"no {i}"} for i in range(5)]
    seen = state_of([runlogs.step(0), runlogs.step(1, loss=None), *warnings])
    shown = rows(seen, 0.0)
    assert dict(shown)["loss"].endswith("3.000, 1 steps skipped")
    assert [text for label, text in shown if label == "warning"] == ["no 2", "no 3", "no 4"]
    assert shown[-1][1] == "and 2 warnings before"


def test_sparklines_show_ups_and_downs_in_their_width():
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline(list(range(1000)), 32)) == 32
    assert sparkline([0.0] * 50 + [7.0] * 50, 4) == "▁▁██"


def test_once_prints_and_leaves(tmp_path, capsys):
    runlogs.write(tmp_path / "run", runlogs.whole_run()[:6])
    assert command(args(tmp_path / "run", once=True)) == 1  # as without: 0 when it finished
    assert "step 4 of 8" in capsys.readouterr().out
    assert command(args(tmp_path / "later", once=True)) == 1
    assert "waiting for the run to begin" in capsys.readouterr().out
    runlogs.write(tmp_path / "run", runlogs.whole_run())
    assert command(args(tmp_path / "run", once=True)) == 0


def test_a_mistyped_name_waits_and_names_the_runs_there_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "compare/dense", "compare/oktopk-0.02"):
        runlogs.write(tmp_path / "runs" / name, runlogs.whole_run())
    assert command(args("quikstart", once=True)) == 1
    said = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "waiting for the run to begin" in said
    assert "there is no runs/quikstart yet; there is runs/compare, runs/quickstart" in said
    assert others(Path("runs/compare/dens")).endswith(
        "runs/compare/dense, runs/compare/oktopk-0.02"
    )
    assert others(Path("elsewhere/dens")).endswith("there is runs/compare, runs/quickstart")
    (tmp_path / "runs" / "begun").mkdir()
    assert others(Path("runs/begun")) == ""


def test_what_is_no_run_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("compare/dense", "compare/oktopk-0.02"):
        runlogs.write(tmp_path / "runs" / name, runlogs.whole_run())
    assert command(args("runs/compare/dense/metrics.jsonl")) == 2
    assert "metrics.jsonl is a file: give the folder of a run" in capsys.readouterr().err
    assert command(args("compare")) == 2
    said = capsys.readouterr().err
    assert (
        "runs/compare is not a run, but has runs in it: watch one of runs/compare/dense, " in said
    )
    assert command(args("runs")) == 2
    assert "watch one of runs/compare\n" in capsys.readouterr().err


def test_in_a_pipe_there_is_a_line_when_something_is_new(tmp_path, capsys, monkeypatch):
    run, growing = runlogs.whole_run(), []

    def pause(_: float) -> None:
        growing.append(capsys.readouterr().out)
        runlogs.write(tmp_path / "run", [run[:4], run[:4], run[:7], run][len(growing) - 1])

    monkeypatch.setattr(watch, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(watch, "time", SimpleNamespace(**vars(time) | {"sleep": pause}))
    assert command(args(tmp_path / "run")) == 0
    assert growing == [
        "waiting for the run to begin\n",
        "running, step 3 of 8, sparse phase, loss 3.500, about 0.5 s left\n",
        "",  # nothing was new
        "running, step 4 of 8, sparse phase, loss 3.250, WER 1.000, about 0.4 s left\n",
    ]
    assert "finished" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(("how", "code"), [("finished", 0), ("stopped", 1), ("failed", 1)])
def test_it_waits_for_the_run_and_ends_with_it(tmp_path, capsys, monkeypatch, how, code, terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    folder = tmp_path / "run"

    def run() -> None:
        time.sleep(0.2)
        runlogs.write(folder, [runlogs.opening(), runlogs.step(0)])
        time.sleep(0.2)
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(runlogs.lines([runlogs.end(how)]))

    thread = threading.Thread(target=run)
    thread.start()
    assert command(args(folder)) == code
    thread.join()
    assert how in capsys.readouterr().out


def test_a_name_means_a_folder_in_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("here")
    assert [str(find(run)) for run in ("here", "quickstart", "a/b")] == [
        "here",
        "runs/quickstart",
        "a/b",
    ]


def test_tensorboard_sees_a_flush_before_the_run_ends(tmp_path):
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def tags(kind: str) -> set[str]:
        events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
        events.Reload()
        return set(events.Tags()[kind])

    board = TensorBoardWriter(tmp_path, 0)
    board.write_steps(runlogs.records([runlogs.step(0)]))
    parts = {f"seconds/{name}" for name in (*runlogs.SECONDS, *runlogs.OVERLAPPED, "whole")}
    assert {"train/loss", "traffic/bytes_sent", *parts} <= tags("scalars")
    board.write_probes([ProbeRecord(step=0, recall=0.9)])
    assert "quality/recall" in tags("scalars")
    board.write_histograms("gradient", {"weight": torch.ones(4)}, 0)
    assert {"gradient/weight", "gradient/all"} <= tags("histograms")
    board.close()


def test_tensorboard_continues_the_bytes_of_a_resumed_run_and_shows_its_settings(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoardWriter(tmp_path, 4, PhaseTotals(bytes_sent=100, bytes_dense=700))
    board.write_hparams({"lr": 0.1, "method": "oktopk", "augment": True, "list": [1]}, ["wer"])
    first, second = runlogs.records([runlogs.step(4), runlogs.step(5)])
    board.write_steps([first, second])
    board.write_epoch(EpochRecord(epoch=0, step=5, memory=[RankMemory(5, 6, 0, 0, 0)]))
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert "memory/rss/rank0" in tags and not [tag for tag in tags if "gpu" in tag]
    totals = [event.value for event in events.Scalars("traffic/bytes_sent_total")]
    assert totals == [100 + first.bytes_sent, 100 + first.bytes_sent + second.bytes_sent]
    assert "_hparams_/session_start_info" in events.summary_metadata
