# SPDX-License-Identifier: Apache-2.0
"""Runs of the trainer in real ranks: metrics, validation, resume."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import speech
from oktopk.errors import RunError
from oktopk.lab.runlog import reader
from oktopk.lab.tasks.speech.synthesis import synthesize_corpus
from oktopk.lab.tasks.speech.task import Speech, errors
from oktopk.lab.train.validate import is_validated


@pytest.fixture(scope="module")
def finished(worlds, corpus, tmp_path_factory):
    """Three epochs of four steps on three ranks."""
    runs = str(tmp_path_factory.mktemp("runs"))
    return worlds.run(3, speech.train, corpus, runs, {"epochs": 3}, False)


def test_every_step_has_its_metrics_in_both_phases(finished):
    steps = speech.entries(finished[0][0], "step")
    assert [entry["step"] for entry in steps] == list(range(12))
    assert [entry["epoch"] for entry in steps] == [0] * 4 + [1] * 4 + [2] * 4
    assert [entry["phase"] for entry in steps] == ["dense"] * 2 + ["sparse"] * 10
    names = "loss lr k local result sparsity compression_ratio bytes_sent bytes_dense messages"
    names += " local_threshold global_threshold imbalance select exchange scatter exposed"
    for entry in steps:
        assert all(math.isfinite(entry[name]) for name in names.split())
        parts = sum(entry[part] for part in ("data", "forward", "backward", "exposed", "optimizer"))
        assert parts <= entry["whole"]
    for entry in steps[:2]:
        assert (entry["sparsity"], entry["compression_ratio"]) == (0, 1)
        assert entry["bytes_sent"] == entry["bytes_dense"]
    for entry in steps[2:]:
        assert entry["sparsity"] > 0.5 and entry["bytes_sent"] < entry["bytes_dense"]


def test_epochs_are_reported_under_their_own_number_and_the_last_is_validated(finished):
    epochs = speech.entries(finished[0][0], "epoch")
    assert [entry["epoch"] for entry in epochs] == [0, 1, 2]
    validations = speech.entries(finished[0][0], "validation")
    assert [entry["epoch"] for entry in validations] == [0, 2]
    assert validations[-1]["metrics"] == finished[0][1].metrics
    assert len(epochs[-1]["memory"]) == 3
    assert all(memory["rss"] > 0 for memory in epochs[-1]["memory"])
    steps = speech.entries(finished[0][0], "step")
    for epoch in epochs:
        own = [entry["loss"] for entry in steps if entry["epoch"] == epoch["epoch"]]
        assert epoch["train_loss"] == pytest.approx(sum(own) / 4, rel=1e-5)


def test_all_ranks_report_the_same(finished):
    assert finished[0][1].samples and not finished[1][1].samples  # rank 0 shows some
    for _, result, _ in finished[1:]:
        assert result.metrics == finished[0][1].metrics
        assert result.examples == finished[0][1].examples
    bytes_sent = [[phase[2] for phase in totals] for *_, totals in finished]
    assert bytes_sent == [bytes_sent[0]] * 3


def test_tensorboard_has_scalars_and_histograms_around_activation(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = speech.Path(finished[0][0])  # the name of a run in TensorBoard is that of its folder
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    events.Reload()
    tags = events.Tags()
    assert {"train/loss", "compression/sparsity", "traffic/bytes_sent", "epoch/wer"} <= set(
        tags["scalars"]
    )
    assert {"gradient/all", "residual/all"} <= set(tags["histograms"])
    drawn = [event.step for event in events.Histograms("gradient/all")]
    assert {1, 2, 3} <= set(drawn)  # the last dense step, the first two sparse ones
    assert not [tag for tag in tags["scalars"] if "gpu" in tag]  # there is none
    assert len(list(folder.glob("**/events.out.tfevents.*"))) == 1  # no second run for settings
    steps = speech.entries(finished[0][0], "step")
    for field in ("bytes_sent", "bytes_dense"):
        total = events.Scalars(f"traffic/{field}_total")[-1]
        assert total.value == pytest.approx(sum(step[field] for step in steps))


def test_what_travelled_is_counted_by_tensor(finished):
    steps = speech.entries(finished[0][0], "step")
    counted = speech.entries(finished[0][0], "tensors")
    assert [entry["step"] for entry in counted] == [0, 1, 2, 3, 7, 11]
    large = "rnns.0.rnn.weight_ih_l0"
    for entry in counted[2:]:
        # a sum of entries may be zero by chance, or below the smallest float: kept, and not seen
        assert 0.9 < sum(entry["kept"].values()) / steps[entry["step"]]["result"] <= 1
        assert entry["kept"][large] < entry["of"][large]


def test_validation_has_the_same_numbers_on_any_number_of_ranks(worlds, corpus, tmp_path):
    """The same weights: no step is taken that could change them."""
    settings = {"max_steps": 1, "lr": 1e-30, "weight_decay": 0.0, "batch": 1}
    results = {}
    for P in (1, 2, 3):
        answers = worlds.run(
            P, speech.train, corpus, str(tmp_path / str(P)), settings | {"momentum": 0.0}, False
        )
        results[P] = answers[0][1]
    assert results[1].examples == 7
    wer = [results[P].metrics["wer"] for P in (1, 2, 3)]
    assert wer == [wer[0]] * 3


@pytest.mark.parametrize(
    ("method", "breaks_at", "more"),
    [
        ("oktopk", 3, {}),
        ("oktopk", 4, {}),
        ("oktopk", 5, {}),
        ("local_steps", 3, {}),
        ("local_steps", 4, {}),
        ("local_steps", 4, {"delay": 2, "fragments": 2}),  # its checkpoint is taken in flight
    ],
)
def test_a_resumed_run_has_the_same_bits(worlds, corpus, tmp_path, method, breaks_at, more):
    """Broken off in the middle of an epoch, at its end and after: as if it never stopped."""
    settings = more | {
        "method": method,
        "every": 3,
        "epochs": 2,
        "checkpoint_every": 2,
        "accumulate": 2,
        "batch": 1,
        "lr_final": 0.1,
    }
    whole = worlds.run(2, speech.train, corpus, str(tmp_path / "whole"), settings, False)
    broken = str(tmp_path / "broken")
    worlds.run(2, speech.train, corpus, broken, settings, False, {"breaks_at": breaks_at})
    resumed = worlds.run(2, speech.train, corpus, broken, settings, True)
    assert resumed[0][1] == whole[0][1]
    first, second = speech.newest(whole[0][0]), speech.newest(resumed[0][0])
    assert first.name == second.name
    for name in ("common.pt", "rank-0.pt", "rank-1.pt"):
        assert_same(load(first / name), load(second / name))
    for kind in ("step", "epoch", "validation"):
        first, second = (
            [speech.timeless(entry) for entry in speech.entries(folder, kind)]
            for folder in (whole[0][0], resumed[0][0])
        )
        assert first == second


def test_another_number_of_ranks_goes_on(worlds, corpus, tmp_path):
    """What was owed is shared out; the epoch goes on where it was."""
    settings = {"epochs": 2, "checkpoint_every": 1}
    runs = str(tmp_path)
    worlds.run(3, speech.train, corpus, runs, settings, False, {"breaks_at": 3})
    folder, result, _ = worlds.run(2, speech.train, corpus, runs, settings, True)[0]
    steps = [(entry["epoch"], entry["step"]) for entry in speech.entries(folder, "step")]
    assert steps[:3] == [(0, 0), (0, 1), (0, 2)]
    assert [step for _, step in steps] == list(range(len(steps)))
    assert [epoch for epoch, _ in steps].count(1) == 6  # 26 utterances, 4 a step
    assert result is not None


def test_a_run_that_was_cut_short_goes_on_in_the_same_epoch(worlds, corpus, tmp_path):
    settings = {"epochs": 2, "lr_final": 0.1}  # 6 steps an epoch
    whole = worlds.run(2, speech.train, corpus, str(tmp_path / "whole"), settings, False)
    cut = str(tmp_path / "cut")
    worlds.run(2, speech.train, corpus, cut, settings | {"max_steps": 3}, False)
    longer = worlds.run(2, speech.train, corpus, cut, settings | {"max_steps": 0}, True)
    first, second = (
        [speech.timeless(entry) for entry in speech.entries(folder, "step")]
        for folder in (whole[0][0], longer[0][0])
    )
    assert first == second
    epochs = [(e["epoch"], e["complete"]) for e in speech.entries(longer[0][0], "epoch")]
    assert epochs == [(0, False), (0, True), (1, True)]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_bytes_stay_what_they_were_with_other_ranks(worlds, corpus, tmp_path, before, after):
    settings = {"epochs": 9, "max_steps": 3}
    _, _, totals = worlds.run(before, speech.train, corpus, str(tmp_path), settings, False)[0]
    _, result, later = worlds.run(after, speech.train, corpus, str(tmp_path), settings, True)[0]
    assert result is None  # nothing was left to do
    assert [phase[:4] for phase in later] == [phase[:4] for phase in totals]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": 16}, "is of a run with hidden 8 and not 16"),
        ({"method": "gtopk"}, "is of a run with method oktopk and not gtopk"),
        ({"optimizer": "sgd"}, "is of a run with optimizer adamw and not sgd"),
    ],
)
def test_another_run_is_not_resumed(worlds, corpus, tmp_path, changed, message):
    settings = {"max_steps": 1}
    worlds.run(1, speech.train, corpus, str(tmp_path), settings, False)
    before = (tmp_path / "tiny" / "config.toml").read_text()
    [answer] = worlds.run(1, speech.train, corpus, str(tmp_path), settings | changed, True)
    assert message in answer and "--name" in answer
    assert (tmp_path / "tiny" / "config.toml").read_text() == before


def test_other_recordings_are_not_taken_for_the_same(worlds, corpus, tmp_path):
    synthesize_corpus(tmp_path / "other", train=26, test=7, seed=4)
    settings = {"max_steps": 1}
    worlds.run(1, speech.train, corpus, str(tmp_path), settings, False)
    [answer] = worlds.run(1, speech.train, str(tmp_path / "other"), str(tmp_path), settings, True)
    assert "is of a run on other data" in answer


def test_a_cut_metrics_file_is_mended(worlds, corpus, tmp_path):
    worlds.run(1, speech.train, corpus, str(tmp_path), {"max_steps": 4}, False)
    path = tmp_path / "tiny" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-300])
    worlds.run(1, speech.train, corpus, str(tmp_path), {"max_steps": 6}, True)
    assert [entry["step"] for entry in speech.entries(tmp_path / "tiny", "step")][-2:] == [4, 5]


def test_two_runs_do_not_share_a_folder(tmp_path):
    numbers = [reader.create_run_directory(tmp_path, "a", resume=False) for _ in range(3)]
    assert numbers == [1, 2, 3] and reader.latest_number(tmp_path, "a") == 3
    with (
        reader.lock(tmp_path / "a"),
        pytest.raises(RunError, match="another run is writing"),
    ):
        reader.lock(tmp_path / "a")
    reader.lock(tmp_path / "a").close()


def test_a_second_run_does_not_write_over_the_first(worlds, corpus, tmp_path):
    settings = {"max_steps": 1}
    folders = [
        worlds.run(1, speech.train, corpus, str(tmp_path), settings, False)[0][0] for _ in range(2)
    ]
    assert [speech.Path(folder).name for folder in folders] == ["tiny", "tiny-2"]


@pytest.mark.parametrize(
    ("said", "heard", "expected"),
    [
        ("GO", "GO", (0, 1, 0, 2)),
        ("GO", "", (1, 1, 2, 2)),
        ("GO", "A B GO", (2, 1, 4, 2)),
        ("ONE TWO", "ONE TO", (1, 2, 1, 7)),
    ],
)
def test_errors_by_hand(said, heard, expected):
    assert errors(said, heard) == expected


def test_rates_are_of_the_corpus_and_may_exceed_one():
    rows = torch.tensor([[2.0, 2, 1, 4, 2], [4.0, 0, 3, 0, 8]], dtype=torch.float64)
    summarize = partial(Speech.summarize, None)
    assert summarize(rows) == {
        "wer": 2 / 4,
        "cer": 4 / 10,
        "val_loss": 3.0,
        "mean_utterance_wer": (2 / 1 + 0 / 3) / 2,
        "pseudo_accuracy": 0.5,
    }
    assert summarize(rows[:1])["wer"] == 2.0
    assert summarize(rows[:1])["pseudo_accuracy"] == 0.0


def test_epochs_0_4_9_and_the_last_are_validated():
    assert [e for e in range(12) if is_validated(e, 12, 5)] == [0, 4, 9, 11]
    assert [e for e in range(10) if is_validated(e, 10, 5)] == [0, 4, 9]
    assert [e for e in range(3) if is_validated(e, 3, 1)] == [0, 1, 2]


def load(path):
    return torch.load(path, weights_only=True)


def assert_same(one, other, path=""):
    """Equal to the bit, wherever a tensor is."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            if not path.endswith(("/totals", "/progress")) or key != "microseconds":
                assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list):
        if path.endswith("/totals"):  # the last of each is a time
            one, other = ([row[:-1] for row in rows] for rows in (one, other))
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif not path.endswith(
        ("/config", "/journal_bytes", "/progress/seconds")
    ):  # folders and clocks differ
        assert one == other, path
