# SPDX-License-Identifier: Apache-2.0
"""`oktopk train` as people start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import speech
from launchers import environment
from oktopk import cli
from oktopk.lab.runlog.reader import (
    METRICS_FILE,
    create_run_directory,
    has_checkpoint,
    latest_number,
    latest_resumable,
)
from oktopk.lab.train import checkpoint
from oktopk.lab.train import run as train_command
from oktopk.lab.train.config import Config
from oktopk.lab.train.config_files import to_toml
from oktopk.lab.train.run import find_and_restore, resolve
from speech import SMALL

RUN = [sys.executable, "-m", "oktopk", "train"]
LIMIT = 100


def flags(corpus, runs, *more: str) -> list[str]:
    return [*SMALL, "--data", corpus, "--runs", str(runs), "--name", "tiny", *more]


def finish(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False
    )


def test_a_healthy_run_says_what_matters_and_warns_of_nothing(corpus, tmp_path):
    done = finish([*RUN, *flags(corpus, tmp_path, "--epochs", "1", "--workers", "3")])
    assert done.returncode == 0, done.stderr
    whole = done.stdout + done.stderr
    assert "warning" not in whole.lower() and "Traceback" not in whole
    assert "3 workers x batch 2 on cpu" in done.stdout
    assert "step 2: the sparse phase begins" in whole
    assert re.search(r"epoch 0  train loss \d+\.\d+  \(ms per step", done.stdout)
    assert re.search(
        r"validated after step \d: WER \d\.\d+, CER \d\.\d+, validation loss \d", done.stdout
    )
    assert "said  " in done.stdout and "heard " in done.stdout
    assert re.search(r"sparse phase +\d+ +\d+", done.stdout)
    assert f"run folder: {tmp_path}/tiny" in done.stdout
    events = {path.name for path in (tmp_path / "tiny").glob("events.out.tfevents.*")}
    assert len(events) == 1
    assert {path.name for path in (tmp_path / "tiny").iterdir()} - events == {
        ".lock",
        "config.toml",
        "metrics.jsonl",
        "report.html",
        "checkpoints",
    }


@pytest.mark.slow
def test_a_run_too_short_for_the_sparse_phase_says_so_at_the_start(corpus, tmp_path):
    """As lstm_debug is: all of it is warm-up."""
    more = ("--max-steps", "2", "--warmup-steps", "9", "--workers", "1")
    done = finish([*RUN, *flags(corpus, tmp_path, *more)])
    assert done.returncode == 0, done.stderr
    assert "the run has 2 steps and the warm-up 9: it will never be sparse" in done.stderr
    assert "1 worker x batch 2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--densty", "0.1"], "did you mean '--density'"),
        (["--density", "7"], "density must be in (0, 1], got 7.0"),
        (["--config", "lstm_ful"], "lstm_full"),
        (["--workers", "0"], "workers must be at least 1, got 0"),
        (["--lr", "nan"], "lr must be finite, got nan"),
        (["--seed", "-1"], "seed must be at least 0, got -1"),
        (["--name", "p/q"], "name must be letters"),
        (["--name", ""], "name must be letters"),
        (["--workers", "1", "--runs", "/proc/x"], "/proc/x"),
        (["--data", "/nowhere", "--workers", "1"], "/nowhere must have one file"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["oktopk", "train", "--runs", str(tmp_path), *arguments])
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code not in (0, None)
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


def worker(parent: subprocess.Popen, variable: str) -> int:
    """The child that has this in its environment, once it is there."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        listed = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        for pid in listed:
            if variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return int(pid)
        time.sleep(0.05)
    raise AssertionError(f"no child with {variable}")


def wait_for_checkpoint(folder: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and not list(folder.glob("checkpoints/*/complete.json")):
        time.sleep(0.05)


def kill_one(command: list[str], variable: str, folder: Path) -> tuple[int, str, str]:
    """Start, kill the worker after the first checkpoint, and see how it ends."""
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        pid = worker(process, variable)
        wait_for_checkpoint(folder)
        os.kill(pid, signal.SIGKILL)
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, out, err


ENDLESS = ("--epochs", "400", "--checkpoint-every", "3", "--validate-every", "1000")


@pytest.mark.slow
def test_a_killed_worker_loses_only_the_steps_since_the_checkpoint(corpus, tmp_path):
    folder = tmp_path / "tiny"
    command = [*RUN, *flags(corpus, tmp_path, "--workers", "2", *ENDLESS)]
    code, _, err = kill_one(command, "OKTOPK_RANK=1", folder)
    assert code and "rank 1 of 2 was killed by SIGKILL" in err
    reached = int(speech.newest(folder).name.removeprefix("step-"))
    more = ("--workers", "2", "--resume", *ENDLESS, "--max-steps", str(reached + 1))
    resumed = finish([*RUN, *flags(corpus, tmp_path, *more)])
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming from {folder}/checkpoints/step-{reached:08}" in resumed.stderr
    steps = [entry["step"] for entry in speech.entries(folder, "step")]
    assert steps == list(range(reached + 1))


@pytest.mark.slow
@pytest.mark.timeout(240)  # six processes import torch
def test_torchrun_restarts_after_a_lost_worker_and_goes_on(corpus, tmp_path):
    folder = tmp_path / "tiny"
    steps = ("--epochs", "2", "--checkpoint-every", "2", "--validate-every", "1000", "--resume")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.2"]
    command = [*torchrun, "-m", "oktopk", "train", *flags(corpus, tmp_path, *steps)]
    code, out, err = kill_one(command, "LOCAL_RANK=1", folder)
    assert code == 0, err
    assert "resuming from" in err and "run folder" in out
    assert [entry["step"] for entry in speech.entries(folder, "step")] == list(range(12))


def test_being_asked_to_stop_saves_first(corpus, tmp_path):
    command = [*RUN, *flags(corpus, tmp_path, "--workers", "2", *ENDLESS)]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for_checkpoint(tmp_path / "tiny")
        process.terminate()
        _, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    saved = re.search(r"stopped and saved at step (\d+): continue with --resume", err)
    assert saved and process.returncode
    assert speech.newest(tmp_path / "tiny").name == f"step-{int(saved[1]):08}"


@pytest.mark.slow
def test_the_full_size_passes_from_dense_to_sparse(corpus, tmp_path):
    """lstm_extended with a shorter warm-up: 98 % of 27.6 million entries stay home."""
    more = [
        "--workers",
        "2",
        "--batch",
        "1",
        "--warmup-steps",
        "1",
        "--max-steps",
        "3",
        "--validate-batch",
        "7",
    ]
    run = [*RUN, "--config", "lstm_extended", "--data", corpus, "--runs", str(tmp_path), *more]
    done = finish(run)
    assert done.returncode == 0, done.stderr
    assert "27,569,568 parameters" in done.stdout
    steps = speech.entries(tmp_path / "lstm_extended", "step")
    assert [entry["phase"] for entry in steps] == ["dense", "sparse", "sparse"]
    for entry in steps[1:]:
        assert 1 - entry["sparsity"] == pytest.approx(0.02, rel=0.1)


def checkpointed(folder: Path, config: Config | None = None) -> Path:
    """A run's folder that looks as if there was something to resume."""
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001" / "complete.json").write_text("{}")
    if config is not None:
        (folder / "config.toml").write_text(to_toml(config))
    return folder


def test_the_newest_run_with_a_checkpoint_is_resumed(tmp_path):
    checkpointed(tmp_path / "a", Config(name="a", lr=0.5))
    checkpointed(tmp_path / "a-2", Config(name="a", lr=0.25))
    (tmp_path / "a-3").mkdir()
    assert latest_number(tmp_path, "a") == 3 and latest_resumable(tmp_path, "a") == 2
    assert create_run_directory(tmp_path, "a", resume=True) == 2
    assert create_run_directory(tmp_path, "a", resume=False) == 4
    args = cli.parser([]).parse_args(["train", "--runs", str(tmp_path), "--name", "a", "--resume"])
    assert resolve(args).lr == 0.25


def test_without_a_checkpoint_the_newest_folder_is_used_again(tmp_path):
    (tmp_path / "a").mkdir()
    assert create_run_directory(tmp_path, "a", resume=True) == 1


def test_only_a_run_that_was_begun_before_has_no_checkpoint(tmp_path, monkeypatch, caplog):
    """`oktopk compare` resumes every run, new ones too."""
    monkeypatch.setattr(checkpoint, "find", lambda *_: None)
    run = Mock()
    with caplog.at_level("INFO"):
        assert find_and_restore(run, tmp_path, ()) == 0 and not caplog.messages
        (tmp_path / METRICS_FILE).touch()
        assert find_and_restore(run, tmp_path, ()) == 0
    assert "was begun before and has no checkpoint: starting again" in caplog.messages[0]


@pytest.mark.parametrize("content", ["", "lr = 0.01\n", "name = 5\n", "\0"])
def test_a_damaged_config_is_not_resumed(tmp_path, oktopk, capsys, content):
    folder = checkpointed(tmp_path / "runs" / "a")
    (folder / "config.toml").write_text(content)
    assert oktopk("train", "--name", "a", "--resume") == 2
    said = capsys.readouterr().err
    assert said.startswith("oktopk train: runs/a/config.toml: ") and said.count("\n") == 1
    assert (folder / "config.toml").read_text() == content


def test_mistyped_data_is_told_before_anything_is_made(tmp_path, oktopk, capsys):
    assert oktopk("train", "--data", "typo", "--workers", "2") == 1
    said = capsys.readouterr().err
    assert said == ("oktopk train: typo must have one file *train_manifest.csv; it has none\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made", ["nothing", "folder", "checkpoint"])
def test_resume_is_advised_where_there_is_something_to_resume(tmp_path, monkeypatch, capsys, made):
    """An earlier run of the name does not count."""
    config = Config(name="a", runs=str(tmp_path))
    checkpointed(tmp_path / "a")

    def fail(workers, argv):
        if made != "nothing":
            (tmp_path / "a-2").mkdir(exist_ok=True)
        if made == "checkpoint" and not has_checkpoint(tmp_path / "a-2"):
            checkpointed(tmp_path / "a-2")
        return 1

    monkeypatch.setattr(train_command, "run_local_workers", fail)
    assert train_command.run_workers(2, [], config, resume=False) == 1
    assert ("--resume" in capsys.readouterr().err) == (made == "checkpoint")
    assert train_command.run_workers(2, [], config, resume=True) == 1  # that was the same command
    assert "--resume" not in capsys.readouterr().err
