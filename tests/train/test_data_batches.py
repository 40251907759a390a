# SPDX-License-Identifier: Apache-2.0
"""Spectrograms against plain numpy; batches by their laws."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.lab.tasks.speech import features as spectral
from oktopk.lab.tasks.speech.features import (
    BINS,
    GAIN_DB,
    TEMPO,
    at_tempo,
    augmentation,
    collate,
    features,
    open_spectra,
    plan,
    spectrogram,
)
from oktopk.lab.tasks.speech.recordings import DataError, Utterance, encode
from oktopk.lab.train.validate import shard
from recordings import RATE, save, tone

TEXTS = ["GO", "NO NO", "MAY FIRST", "B B A", "STOP", "R U B"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Utterances of 0.5 to 1.5 s and their spectra."""
    folder = tmp_path_factory.mktemp("corpus")
    utterances = []
    for i, text in enumerate(TEXTS):
        seconds = 0.5 + 0.2 * i
        path = save(folder / str(i), tone(seconds, seed=i), "wav")
        utterances.append(Utterance(path, text, seconds))
    return utterances, open_spectra(utterances, folder / "cache")


def by_hand(samples: np.ndarray) -> np.ndarray:
    """(frames, 161) magnitudes: mirror the ends, multiply by the window, transform."""
    padded = np.concatenate([samples[160:0:-1], samples, samples[-2:-162:-1]])
    window = 0.54 - 0.46 * np.cos(2 * np.pi * np.arange(320) / 319)
    frames = range(len(samples) // 160 + 1)
    return np.stack([np.abs(np.fft.rfft(padded[160 * i : 160 * i + 320] * window)) for i in frames])


def test_spectra_are_those_of_a_plain_transform(corpus):
    utterances, spectra = corpus
    for i, utterance in enumerate(utterances):
        expected = by_hand(tone(utterance.seconds, seed=i) / 32768)
        assert spectra.frames[i] == len(expected) == round(utterance.seconds * 100) + 1
        np.testing.assert_allclose(spectra.magnitudes(i), expected, atol=2e-5)
        logs = np.log1p(expected)
        logs = (logs - logs.mean()) / logs.std(ddof=1)
        x = features(spectra, i)
        assert x.shape == (BINS, len(expected)) and x.dtype == torch.float32
        np.testing.assert_allclose(x, logs.T, atol=1e-4)


@pytest.mark.parametrize("tempo", [0.85, 1.0, 1.15])
def test_tempo_changes_length_and_not_pitch(tempo):
    time = np.arange(2 * RATE) / RATE
    chirp = np.sin(2 * np.pi * (500 + 500 * time) * time).astype(np.float32)
    rows = spectrogram(chirp)
    faster = at_tempo(rows, tempo)
    assert len(faster) == round(len(rows) / tempo)
    third = len(faster) // 3
    assert abs(int(faster[third].argmax()) - int(rows[round(third * tempo)].argmax())) <= 1
    assert torch.equal(faster[0], rows[0])


def test_gain_is_not_lost_in_the_normalisation(corpus):
    _, spectra = corpus
    plain = features(spectra, 2)
    for gain in GAIN_DB:
        louder = features(spectra, 2, gain_db=gain)
        assert abs(float(louder.mean())) < 1e-5 and abs(float(louder.std()) - 1) < 1e-4
        assert float((louder - plain).abs().mean()) > 0.01


def test_features_leave_the_cache_as_it_is(corpus):
    _, spectra = corpus
    before = spectra.magnitudes(3).clone()
    features(spectra, 3).fill_(7)
    features(spectra, 3, tempo=1.1, gain_db=3).fill_(7)
    assert torch.equal(spectra.magnitudes(3), before)


def test_the_cache_is_built_once_and_anew_when_a_recording_changes(tmp_path, monkeypatch):
    path = save(tmp_path / "a", tone(), "wav")
    utterances = [Utterance(path, "GO", 1.0)]
    seen = []
    first = open_spectra(utterances, tmp_path / "cache", lambda *done: seen.append(done))
    assert seen == [(1, 1)] and len(list((tmp_path / "cache").iterdir())) == 1
    again = open_spectra(utterances, tmp_path / "cache", lambda *done: seen.append(done))
    assert len(seen) == 1 and torch.equal(first.rows, again.rows)
    save(tmp_path / "a", tone(2.0), "wav")
    assert open_spectra(utterances, tmp_path / "cache").frames.tolist() == [201]
    monkeypatch.setattr(spectral, "FORMAT", "another")
    open_spectra(utterances, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_cache_that_could_not_be_finished_leaves_nothing(tmp_path):
    path = save(tmp_path / "a", tone(), "wav")

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_spectra([Utterance(path, "GO", 1.0)], tmp_path / "cache", interrupt)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_cache_is_named(tmp_path):
    utterances = [Utterance(save(tmp_path / "a", tone(), "wav"), "GO", 1.0)]
    open_spectra(utterances, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"\.spectra is damaged: remove it"):
        open_spectra(utterances, tmp_path / "cache")


SIZES = {
    "count": st.integers(1, 400),
    "batch": st.integers(1, 9),
    "ranks": st.integers(1, 9),
    "epoch": st.integers(0, 50),
    "seed": st.integers(0, 2**31),
}


@settings(max_examples=150, deadline=None)
@given(**SIZES, shuffle=st.booleans())
def test_every_rank_has_the_same_number_of_full_batches(count, batch, ranks, epoch, seed, shuffle):
    if count < batch * ranks:
        with pytest.raises(ValueError, match=f"{count} utterances do not fill one step"):
            plan(count, batch, ranks, epoch, seed, shuffle)
        return
    steps = plan(count, batch, ranks, epoch, seed, shuffle)
    assert len(steps) == count // (batch * ranks)
    assert all(len(step) == ranks and all(len(b) == batch for b in step) for step in steps)
    dealt = [i for step in steps for bin_ in step for i in bin_]
    assert len(set(dealt)) == len(dealt) and set(dealt) <= set(range(count))
    whole = [sorted(chain(*step)) for step in steps]
    assert list(chain(*sorted(whole))) == sorted(dealt)  # a step has neighbours in duration
    assert steps == plan(count, batch, ranks, epoch, seed, shuffle)
    if not shuffle:
        assert whole == sorted(whole)


@settings(max_examples=100, deadline=None)
@given(count=SIZES["count"], batch=SIZES["batch"], ranks=SIZES["ranks"], epoch=SIZES["epoch"])
def test_ranks_change_who_computes_not_what_is_in_a_step(count, batch, ranks, epoch):
    """One rank with the whole batch takes the same steps; and no rank has all the long ones."""
    count = max(count, batch * ranks)
    alone = plan(count, batch * ranks, 1, epoch, 3)
    dealt = plan(count, batch, ranks, epoch, 3)
    assert [sorted(step[0]) for step in alone] == [sorted(chain(*step)) for step in dealt]
    for step in dealt:
        assert max(step[-1]) == max(chain(*step))
        assert all(a < b for one, other in pairwise(step) for a, b in zip(one, other, strict=True))


def test_epochs_differ_and_leave_nobody_out():
    epochs = [plan(103, 4, 5, epoch, seed=1) for epoch in range(30)]
    dealt = [{i for step in steps for bin_ in step for i in bin_} for steps in epochs]
    assert len({str(steps) for steps in epochs}) == 30
    assert set.union(*dealt) == set(range(103)) and len(set(map(frozenset, dealt))) > 20
    assert plan(103, 4, 5, 0, seed=1) != plan(103, 4, 5, 0, seed=2)


@given(count=st.integers(0, 200), batch=SIZES["batch"], ranks=SIZES["ranks"])
def test_validation_hears_everyone_once(count, batch, ranks):
    parts = [shard(count, batch, ranks, rank) for rank in range(ranks)]
    assert sorted(i for part in parts for bin_ in part for i in bin_) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(0 < len(bin_) <= batch for part in parts for bin_ in part)


@pytest.mark.parametrize("augment", [False, True])
def test_a_batch_is_longest_first_and_zero_beyond(corpus, augment):
    utterances, spectra = corpus
    made = collate(spectra, utterances, [0, 5, 3], epoch=2, seed=4, augment=augment)
    assert made.ids == [5, 3, 0] and made.texts == [TEXTS[i] for i in made.ids]
    assert made.inputs.shape == (3, 1, BINS, int(made.lengths.max()))
    assert made.inputs.dtype == torch.float32 and made.lengths.dtype == torch.int64
    assert made.lengths.tolist() == sorted(made.lengths.tolist(), reverse=True)
    assert made.targets.tolist() == [label for text in made.texts for label in encode(text)]
    assert made.target_lengths.tolist() == [len(text) for text in made.texts]
    for x, i, length in zip(made.inputs, made.ids, made.lengths.tolist(), strict=True):
        tempo, gain = augmentation(4, 2, i) if augment else (1.0, 0.0)
        assert torch.equal(x[0, :, :length], features(spectra, i, tempo, gain))
        assert not x[0, :, length:].any()


def test_chance_depends_on_seed_epoch_and_utterance_alone(corpus):
    utterances, spectra = corpus
    alone = collate(spectra, utterances, [3], 1, 9, True)
    others = collate(spectra, utterances, [0, 3, 1], 1, 9, True)
    row = others.ids.index(3)
    assert torch.equal(others.inputs[row, :, :, : int(alone.lengths[0])], alone.inputs[0])
    drawn = [augmentation(s, e, u) for s in range(8) for e in range(8) for u in range(8)]
    assert len(set(drawn)) == len(drawn)
    for values, (low, high) in zip(np.array(drawn).T, (TEMPO, GAIN_DB), strict=True):
        assert low <= values.min() < low + 0.1 * (high - low)
        assert high >= values.max() > high - 0.1 * (high - low)
