# SPDX-License-Identifier: Apache-2.0
"""The synthesized corpus: one seed gives the same bytes, and the test set has other voices."""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.random import default_rng

from oktopk.cli import parser
from oktopk.lab.tasks.speech import synthesis
from oktopk.lab.tasks.speech import synthesis as sentences
from oktopk.lab.tasks.speech.recordings import (
    DataError,
    check,
    find_manifests,
    read_manifest,
    speaker,
    unknown,
)


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Every voice speaks: 16 training speakers and all of the test."""
    folder = tmp_path_factory.mktemp("spoken")
    synthesis.synthesize_corpus(folder, 16 * 13, 50, seed=3)
    return folder


def test_the_corpus_passes_its_own_check(spoken):
    train, test = map(read_manifest, find_manifests(spoken))
    assert (len(train), len(test)) == (208, 50)
    check(train, test)
    voices = [{speaker(u.audio).split("_")[0] for u in part} for part in (train, test)]
    assert len(voices[0]) == 16 and len(voices[1]) == 5 and not voices[0] & voices[1]
    seconds = [u.seconds for u in train]
    assert min(seconds) > 0.4 and max(seconds) < 6 and 1 < np.mean(seconds) < 3


def test_the_same_seed_speaks_the_same_bytes(tmp_path):
    """In another process and another second: the synthesiser seeds itself from the clock."""
    synthesis.synthesize_corpus(tmp_path / "a", 32, 5, seed=4)
    time.sleep(1.1)
    synthesis.synthesize_corpus(tmp_path / "b", 32, 5, seed=4)
    synthesis.synthesize_corpus(tmp_path / "c", 32, 5, seed=5)
    first, again, other = (digest(tmp_path / name) for name in "abc")
    assert first == again and len(first) == 2 * 37 + 2
    assert set(first.values()).isdisjoint(other[name] for name in other if name.endswith("wav"))


def test_the_longer_the_sentence_the_longer_the_sound():
    who = synthesis._speaker("train", 2, default_rng(0))
    texts = ["A", "A Z A Z", "JANUARY TWENTY SEVENTH", "RUBOUT A Z SIX NINE SIX NINE SIX NINE"]
    lengths = [len(sound) for sound in synthesis._synthesize([who.request(text) for text in texts])]
    assert lengths == sorted(lengths) and lengths[0] > 0.1 * 16_000


def test_the_grammar_says_all_an4_has():
    said = [sentences.sentence(default_rng([7, i])) for i in range(3000)]
    words = {word for text in said for word in text.split()}
    assert not any(unknown(text) for text in said)
    assert set(sentences.LETTERS) | set(sentences.DIGITS) | set(sentences.MONTHS) <= words
    assert set(sentences.COMMANDS) | {"ENTER", "ERASE", "RUBOUT", "TWENTIETH", "NINETY"} <= words
    assert len(set(said)) > 1500
    assert abs(sum(sentences.WEIGHTS) - 1) < 1e-9


@pytest.mark.parametrize("rate", [22_050, 44_100, 8_000, 16_000])
def test_resampling_keeps_the_tone(rate):
    seconds = np.arange(rate) / rate
    tone = np.sin(2 * np.pi * 1000 * seconds) * np.hanning(rate)
    expected = np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000)
    expected *= np.hanning(rate)[np.round(np.linspace(0, rate - 1, 16_000)).astype(int)]
    resampled = synthesis.resample(tone, rate)
    assert len(resampled) == 16_000
    np.testing.assert_allclose(resampled, expected, atol=2e-3)


def test_every_voice_and_accent_sounds_different():
    request = synthesis._speaker("train", 0, default_rng(0)).request("SEVEN")
    voices = [f"en-us+{name}" for names in synthesis.VOICES.values() for name in names]
    voices += [f"{accent}+m1" for accent in synthesis.ACCENTS.values() if accent != "en-us"]
    sounds = list(synthesis._synthesize([request | {"voice": voice} for voice in voices]))
    assert len({sound.tobytes() for sound in sounds}) == len(voices)


@pytest.mark.parametrize("voice", ["en-us+nobody", "xx+m1"])
def test_a_voice_that_is_not_there_is_named(voice):
    request = synthesis._speaker("train", 0, default_rng(0)).request("GO") | {"voice": voice}
    with pytest.raises(DataError, match=f"espeak-ng has no voice {re.escape(voice)} in "):
        list(synthesis._synthesize([request]))


def test_voices_in_a_deep_folder_are_found(tmp_path, monkeypatch):
    """The synthesiser cuts off long paths; missing ones are named."""
    loader = pytest.importorskip("espeakng_loader")
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.parent.mkdir()
    deep.symlink_to(loader.get_data_path(), target_is_directory=True)
    request = synthesis._speaker("train", 0, default_rng(0)).request("GO")
    expected = list(synthesis._synthesize([request]))
    monkeypatch.setattr(loader, "get_data_path", lambda: str(deep))
    np.testing.assert_array_equal(list(synthesis._synthesize([request])), expected)
    monkeypatch.setattr(loader, "get_data_path", lambda: str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"espeak-ng cannot start with the voices in .*nothing"):
        list(synthesis._synthesize([request]))


def test_the_command_speaks_and_reports(tmp_path, capsys):
    words = ["data", "speak", "--train", "5", "--test", "2", "--out", str(tmp_path)]
    args = parser([]).parse_args(words)
    assert args.run(args) == 0
    said = capsys.readouterr().out
    assert "train  5 utterances" in said and "test   2 utterances" in said and str(tmp_path) in said
    args = parser([]).parse_args([*words, "--train", "0"])
    assert args.run(args) == 1
    assert "cannot speak 0 training" in capsys.readouterr().err
    args = parser([]).parse_args([*words, "--seed", "-1"])
    assert args.run(args) == 1
    assert "the seed must not be negative, got -1" in capsys.readouterr().err


def test_the_command_and_the_function_have_the_same_defaults():
    args = parser([]).parse_args(["data", "speak"])
    assert (args.train, args.test, args.seed) == (synthesis.TRAIN, synthesis.TEST, synthesis.SEED)
