# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a run loses the steps since the last checkpoint, and no more."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import speech
from oktopk.errors import RunError
from oktopk.lab.train import checkpoint
from oktopk.lab.train.config import Config
from oktopk.lab.train.exchange import make_exchange
from oktopk.utils.files import FileError
from worlds import forkserver

SETTINGS = {"epochs": 2, "checkpoint_every": 2}  # 6 steps an epoch on two ranks


def broken_off(worlds, corpus, runs) -> Path:
    """The folder of a run that ended after step 5, with checkpoints of steps 2 and 4."""
    assert worlds.run(2, speech.train, corpus, str(runs), SETTINGS, False, {"breaks_at": 5})
    folder = Path(runs) / "tiny"
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004"]
    return folder


@pytest.mark.parametrize("name", ["common.pt", "rank-0.pt", "rank-1.pt", "complete.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_checkpoint_is_passed_over(worlds, corpus, tmp_path, name, damage):
    folder = broken_off(worlds, corpus, tmp_path)
    path = folder / "checkpoints" / "step-00000004" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    found = worlds.run(2, speech.found, str(folder))
    assert found == [str(folder / "checkpoints" / "step-00000002")] * 2


def test_when_no_checkpoint_is_whole_it_says_so(worlds, corpus, tmp_path):
    folder = broken_off(worlds, corpus, tmp_path)
    for path in folder.glob("checkpoints/*/rank-1.pt"):
        path.write_bytes(path.read_bytes()[:100])
    for answer in worlds.run(2, speech.train, corpus, str(tmp_path), SETTINGS, True):
        assert answer.startswith("CheckpointError: no checkpoint in")
        assert "move the folder away" in answer


def test_a_checkpoint_with_code_in_it_is_refused(worlds, corpus, tmp_path):
    """Loading takes tensors and plain values only, whatever the hash says."""
    answers = worlds.run(2, speech.load_poisoned, str(tmp_path))
    assert all("weights_only" in answer.lower() for answer in answers)
    assert not (tmp_path / "ran").exists()


@contextmanager
def small_disk(path: Path, size: str):
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
    made = subprocess.run(mount, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no small disk can be mounted: {made.stderr.decode()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_keeps_the_last_checkpoint(worlds, corpus, tmp_path):
    with small_disk(tmp_path, "9m"):
        folder = broken_off(worlds, corpus, tmp_path)
        ballast, before = tmp_path / "ballast", speech.newest(folder)
        room = os.statvfs(tmp_path)
        ballast.write_bytes(bytes(room.f_bavail * room.f_bsize - 100_000))
        answers = worlds.run(2, speech.train, corpus, str(tmp_path), SETTINGS, True)
        assert any("No space left" in answer and "--resume" in answer for answer in answers)
        assert all("Error" in answer for answer in answers)
        assert worlds.run(2, speech.found, str(folder)) == [str(before)] * 2
        ballast.unlink()
        _, result, _ = worlds.run(2, speech.train, corpus, str(tmp_path), SETTINGS, True)[0]
        assert result is not None


def test_a_full_disk_at_an_epochs_end_keeps_the_only_checkpoint(worlds, corpus, tmp_path):
    """With keep = 1, and a checkpoint due at the very step the epoch ends: it is written once."""
    settings = {"epochs": 1, "checkpoint_every": 3, "keep": 1}
    with small_disk(tmp_path, "9m"):
        answers = worlds.run(
            2, speech.train, corpus, str(tmp_path), settings, False, {"fills_at": 5}
        )
        assert any("No space left" in answer for answer in answers)
        (tmp_path / "ballast").unlink()
        kept = str(tmp_path / "tiny" / "checkpoints" / "step-00000003")
        assert worlds.run(2, speech.found, str(tmp_path / "tiny")) == [kept] * 2


@pytest.mark.parametrize("at", [1, 4])
def test_a_nan_in_the_loss_of_one_rank_is_skipped_by_all(worlds, corpus, tmp_path, at):
    """In the dense phase and in the sparse one."""
    settings = {"epochs": 1, "checkpoint_every": 0}
    answers = worlds.run(
        2, speech.train, corpus, str(tmp_path), settings, False, {"nan_at": (1, at, at)}
    )
    folder, result, totals = answers[0]
    steps = speech.entries(folder, "step")
    assert [entry["skipped"] for entry in steps] == [step == at for step in range(6)]
    assert steps[at]["loss"] is None  # JSON has no NaN
    [epoch] = speech.entries(folder, "epoch")
    assert epoch["train_loss"] == pytest.approx(
        sum(entry["loss"] for entry in steps if not entry["skipped"]) / 5, rel=1e-5
    )
    assert result.metrics["val_loss"] < float("inf")
    assert sum(phase[1] for phase in totals) == 1


def test_a_loss_that_stays_nan_ends_the_run_on_all_ranks(worlds, corpus, tmp_path):
    settings = {"epochs": 9}
    for answer in worlds.run(
        2, speech.train, corpus, str(tmp_path), settings, False, {"nan_at": (0, 3, 99)}
    ):
        assert answer.startswith("DivergedError: rank")
        assert "lower lr" in answer and "--resume" in answer


@pytest.mark.parametrize("settings", [{"checkpoint_every": 2}, {"checkpoint_every": 0}])
def test_weights_that_differ_end_the_run_before_they_are_saved(worlds, corpus, tmp_path, settings):
    """At the next checkpoint, and at the end of the run, on all ranks."""
    answers = worlds.run(
        2, speech.train, corpus, str(tmp_path), {"epochs": 1} | settings, False, {"drifts_at": 3}
    )
    step = 4 if settings["checkpoint_every"] else 6
    for rank, answer in enumerate(answers):
        assert answer.startswith(
            f"RunError: rank {rank}, step {step}: the weights of 'conv.0.weight'"
        )
        assert "differ between rank 0 and rank 1" in answer and "--resume" in answer
    saved = [path.name for path in (tmp_path / "tiny" / "checkpoints").glob("step-*")]
    assert saved == (["step-00000002"] if settings["checkpoint_every"] else [])


def test_metrics_that_cannot_be_written_end_the_run_on_all_ranks(worlds, corpus, tmp_path):
    faults = {"no_files_at": 4}  # kernels are compiled and cached by then
    answers = worlds.run(2, speech.train, corpus, str(tmp_path), {"epochs": 1}, False, faults)
    assert answers[0].startswith("RunError: the metrics could not be written: [Errno 27]")
    assert "--resume" in answers[0]
    assert answers[1].startswith("OthersError: rank 1 stops because writing the metrics failed on")


def test_training_continues_when_tensorboard_cannot_write(tmp_path):
    said = tmp_path / "said"
    process = forkserver().Process(target=small_board, args=(tmp_path, said))
    process.start()
    process.join(30)
    process.kill()
    text = said.read_text()
    assert process.exitcode == 0, text
    lines = [line for line in text.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("TensorBoard's events in"), text
    assert "training continues without them: [Errno 27] File too large" in lines[0]


def small_board(folder: Path, said: Path) -> None:
    """Write more events than a file may have, with all that is said in a file of its own."""
    with said.open("wb") as file:
        os.dup2(file.fileno(), 2)
    from oktopk.lab.runlog.schema import StepRecord
    from oktopk.lab.train.recorder import TensorBoardWriter

    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    board = TensorBoardWriter(folder / "events", 0)
    for step in range(200):
        record = StepRecord(step=step, phase="dense", bytes_sent=0, bytes_dense=0, loss=1.0, lr=0.1)
        board.write_steps([record])
    board.close()


def test_a_checkpoint_renamed_to_a_higher_step_is_not_believed(worlds, corpus, tmp_path):
    """It is passed over, and it does not push out the good ones when a new one is written."""
    folder = broken_off(worlds, corpus, tmp_path)
    place = folder / "checkpoints"
    (place / "step-00000004").rename(place / "step-99999999")
    found = worlds.run(2, speech.found, str(folder))
    assert found == [str(place / "step-00000002")] * 2
    _, result, _ = worlds.run(2, speech.train, corpus, str(tmp_path), SETTINGS, True)[0]
    assert result is not None
    assert {path.name for path in place.iterdir()} >= {"step-00000010", "step-00000012"}


def test_a_checkpoint_of_another_format_says_what_to_do(worlds, corpus, tmp_path):
    folder = broken_off(worlds, corpus, tmp_path)
    for path in (folder / "checkpoints").glob("*/complete.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(FileError, match="has format 99, and this version of oktopk reads format 2"):
        checkpoint.read_info(path.parent)


def test_pruning_leaves_what_somebody_renamed_or_copied(tmp_path):
    for step in (1, 2, 3, 4):
        folder = checkpoint.step_folder(tmp_path, step)
        folder.mkdir()
        written = {"bytes": 0, "sha256": "00" * 32}
        files = dict.fromkeys(("common.pt", "rank-0.pt"), written)
        facts = {"step": step, "world_size": 1, "files": files, "format": checkpoint.FORMAT}
        (folder / "complete.json").write_text(json.dumps(facts))
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000001-best")
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000000")  # as if it were older
    (tmp_path / "step-00000002").mkdir()  # never completed
    checkpoint.prune(tmp_path, keep=1)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-00000000", "step-00000001-best", "step-00000004"]


def test_files_of_another_step_in_a_checkpoint_are_refused(worlds, corpus, tmp_path):
    """A rank's file holds its step itself."""
    folder = broken_off(worlds, corpus, tmp_path)
    early, late = (folder / "checkpoints" / f"step-{step:08}" for step in (2, 4))
    for path in early.glob("*.pt"):
        (late / path.name).write_bytes(path.read_bytes())
    facts = json.loads((early / "complete.json").read_text()) | {"step": 4}
    (late / "complete.json").write_text(json.dumps(facts))
    for answer in worlds.run(2, speech.train, corpus, str(tmp_path), SETTINGS, True):
        assert "progress.step: is of step 2, and the checkpoint of step 4" in answer


def test_settings_change_on_resume_only_when_asked(worlds, corpus, tmp_path):
    folder = broken_off(worlds, corpus, tmp_path)
    changed = SETTINGS | {"lr": 0.5, "seed": 3}
    asked = ["epochs", "checkpoint_every", "seed"]
    for answer in worlds.run(2, speech.train, corpus, str(tmp_path), changed, True, None, asked):
        assert answer.startswith("CheckpointError: ") and "\n" not in answer
        assert "is of a run with lr 0.01 and not 0.5" in answer
        assert "give --lr 0.01 to keep the settings of then, or --lr 0.5 to change them" in answer
    assert "lr = 0.01" in (folder / "config.toml").read_text()
    asked.append("lr")
    worlds.run(2, speech.train, corpus, str(tmp_path), changed, True, None, asked)
    last = speech.entries(folder, "run")[-1]
    assert last["changed"] == {"seed": [0, 3], "lr": [0.01, 0.5]}
    assert "Changed when the run was resumed" in (folder / "report.html").read_text()


def test_a_failed_setup_leaves_no_folder(worlds, tmp_path):
    [answer] = worlds.run(
        1, speech.train, str(tmp_path / "typo"), str(tmp_path / "runs"), {}, False
    )
    assert "typo must have one file" in answer
    assert not (tmp_path / "runs").exists()


def test_a_delay_is_refused_on_cuda():
    """Metrics and validation have collectives of their own, and NCCL needs one order of all."""
    on_cuda = SimpleNamespace(device=torch.device("cuda", 0))
    model = SimpleNamespace(parameters=lambda: iter([on_cuda]))
    config = Config(name="a", method="local_steps", delay=1)
    with pytest.raises(RunError, match=r"delay = 1 does not work on CUDA here.*use delay = 0"):
        make_exchange(config, model, None, 2, 100)
