# SPDX-License-Identifier: Apache-2.0
"""Recordings and labels: every format gives the same samples, every defect its own message."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import soundfile

from oktopk.lab.tasks.speech import recordings
from oktopk.lab.tasks.speech.recordings import (
    BLANK,
    LABELS,
    DataError,
    decode,
    encode,
    extra,
    unknown,
)
from oktopk.utils.extras import MissingPackageError
from recordings import RATE, save, sphere, tone


def test_labels_are_those_of_the_reference():
    assert len(LABELS) == 29 and LABELS[BLANK] == "_" and LABELS[28] == " "
    assert encode("A Z'") == [2, 28, 27, 1]
    assert decode(encode("MAY FIRST")) == "MAY FIRST"
    assert decode([2, 2, 0, 2]) == "AA_A"


@pytest.mark.parametrize("text", ["GO 7", "go", "A_B"])
def test_unknown_characters_are_errors(text):
    with pytest.raises(ValueError, match="no label for"):
        encode(text)
    assert set(unknown(text)) == set(text) - set(LABELS[1:])


@pytest.mark.parametrize("kind", ["wav", "flac", "sph"])
def test_every_format_gives_the_same_samples(tmp_path, kind):
    samples = tone()
    path = save(tmp_path / "x", samples, kind)
    assert recordings.duration(path) == len(samples) / RATE
    np.testing.assert_array_equal(recordings.read_audio(path) * 32768, samples)


@pytest.mark.parametrize("order", ["01", "10"])
def test_sphere_of_both_byte_orders(tmp_path, order):
    path = tmp_path / "x.sph"
    path.write_bytes(sphere(tone(), order))
    np.testing.assert_array_equal(recordings.read_audio(path) * 32768, tone())


@pytest.mark.parametrize("order", ["big", "little"])
def test_byte_order_of_raw_files_is_detected(tmp_path, order):
    paths = [save(tmp_path / str(i), tone(seed=i), f"{order}-endian") for i in range(3)]
    (tmp_path / "empty.raw").touch()
    assert recordings.byte_order([*paths, tmp_path / "empty.raw"]) == order
    np.testing.assert_array_equal(recordings.read_raw(paths[1], order) * 32768, tone(seed=1))


def test_noise_has_no_byte_order(tmp_path):
    noise = np.random.default_rng(0).integers(-32768, 32767, 8000).astype(np.int16)
    with pytest.raises(DataError, match="neither byte order"):
        recordings.byte_order([save(tmp_path / "x", noise, "big-endian")])


def test_wav_comes_back_bit_for_bit(tmp_path):
    samples = np.array([-32768, 32767, 0, 1, -1] * 100, np.int16)
    recordings.write_wav(tmp_path / "x.wav", samples.astype(np.float32) / 32768)
    read, rate = soundfile.read(tmp_path / "x.wav", dtype="int16")
    assert rate == RATE
    np.testing.assert_array_equal(read, samples)


def test_channels_are_averaged(tmp_path):
    both = np.stack([tone(), np.zeros_like(tone())], axis=1)
    soundfile.write(tmp_path / "x.wav", both, RATE)
    np.testing.assert_allclose(recordings.read_audio(tmp_path / "x.wav") * 65536, tone())


def test_silence_is_heard():
    assert recordings.silent(np.zeros(400)) and recordings.silent(np.full(400, 0.25))
    assert not recordings.silent(tone() / 32768)


def broken(tmp_path, how):
    path = tmp_path / f"{how}.wav"
    if how == "missing":
        return path
    soundfile.write(path, tone(0.01 if how == "short" else 1.0), 8000 if how == "8 kHz" else RATE)
    data = path.read_bytes()
    if how == "8 kHz":
        return path
    if how == "sphere":
        data = sphere(tone(), count=20_000)
    if how == "flac":
        soundfile.write(path, tone(3.0), RATE, format="FLAC")
        data = path.read_bytes()[:-20_000]
    cuts = {"empty": b"", "truncated": data[:-3000], "text": b"GO" * 100}
    path.write_bytes(cuts.get(how, data))
    return path


@pytest.mark.parametrize(
    "how, message",
    [
        ("missing", "is missing"),
        ("empty", "is empty"),
        ("truncated", "is truncated: 29044 of 32044 bytes"),
        ("sphere", "is truncated: 33024 of 41024 bytes"),
        ("flac", "is truncated|cannot be decoded"),
        ("8 kHz", "has 8000 samples per second: resample it to 16000"),
        ("text", "is not a WAV, FLAC or sphere file"),
        ("short", "has 160 samples"),
    ],
)
def test_each_defect_has_its_message(tmp_path, how, message):
    path = broken(tmp_path, how)
    with pytest.raises(DataError, match=message) as error:
        recordings.read_audio(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "data, message",
    [(None, "missing"), (b"", "empty"), (b"abc", "3 bytes are no whole"), (b"ab", "has 1 samples")],
)
def test_each_defect_of_raw_files_has_its_message(tmp_path, data, message):
    path = tmp_path / "x.raw"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        recordings.read_raw(path, "big")


def test_raw_files_belong_to_an4(tmp_path):
    with pytest.raises(DataError, match=r"x.raw has no header: `oktopk data an4`"):
        recordings.duration(save(tmp_path / "x", tone(), "big-endian"))


def test_a_long_list_of_problems_is_cut_and_counted():
    error = DataError(f"file {i}" for i in range(50))
    assert str(error).startswith("50 problems") and str(error).endswith("and 30 more")
    assert "file 19\n" in str(error) and "file 20" not in str(error)
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


def test_a_missing_extra_says_how_to_install_it():
    with pytest.raises(MissingPackageError, match=r"pip install 'oktopk\[train\]'"):
        extra("no_such_module")
