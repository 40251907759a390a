"""An AN4-like corpus from a speech synthesiser: no download, the same bytes from the same seed."""

# ruff: noqa: SIM905 (lists of words are easier to read as text)

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng

from oktopk.train.data import voice
from oktopk.train.data.audio import RATE, write_wav
from oktopk.train.data.manifest import Utterance, write_manifest
from oktopk.train.data.problems import DataError, extra
from oktopk.train.data.sentences import sentence

TRAIN, TEST, SEED = 800, 100, 1
MOST = 10**6

ACCENTS = {
    "us": "en-us",
    "nyc": "en-us-nyc",
    "gb": "en",
    "rp": "en-gb-x-rp",
    "scot": "en-gb-scotland",
    "lanc": "en-gb-x-gbclan",
}
# Voices of the test speak in no training utterance, in no accent.
VOICES = {
    "train": "m1 m2 m3 m4 m6 m8 f1 f2 f4 f5 Andrea adam belinda david edward steph".split(),
    "val": "m7 f3 linda Michael paul".split(),
}
PER_SPEAKER = {"train": 13, "val": 10}  # utterances, as in AN4

# As espeak-ng should read them: "A" alone is an article to it, and "Z" depends on the accent.
SPOKEN = {"A": "[['eI]]", "Z": "zee", "RUBOUT": "rub-out"}
LONGEST_PATH = 140  # bytes; espeak-ng cuts longer ones off


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice of the synthesiser with its own pitch and speed."""

    name: str
    voice: str
    speed: int
    pitch: int
    range: int
    gap: int
    """Tens of milliseconds between words."""

    def request(self, text: str) -> dict[str, Any]:
        spoken = " ".join(SPOKEN.get(word, word.lower()) for word in text.split())
        facts = {name: getattr(self, name) for name in ("voice", *voice.PARAMETERS)}
        return facts | {"text": spoken}


def speak(
    out: str | Path, train: int = TRAIN, test: int = TEST, seed: int = SEED
) -> tuple[Path, Path]:
    """Speak a corpus into `out` and return its two manifests. The defaults take seconds.

    Speakers differ between training and test; every recording has noise, at 20 to 35 dB.
    """
    if min(train, test) < 1:
        raise DataError([f"cannot speak {train} training and {test} test utterances: one at least"])
    if max(train, test) > MOST:
        raise DataError([f"cannot speak {max(train, test):.0e} utterances: at most {MOST:,}"])
    if seed < 0:
        raise DataError([f"the seed must not be negative, got {seed}"])
    parts = [_cast("train", train, seed), _cast("val", test, seed)]
    sounds = iter(_say([speaker.request(text) for part in parts for speaker, text in part]))
    manifests = []
    for number, (part, lines) in enumerate(zip(("train", "val"), parts, strict=True)):
        folder = Path(out) / part
        folder.mkdir(parents=True, exist_ok=True)
        pairs = []
        for i, (speaker, text) in enumerate(lines):
            samples = _room(next(sounds), default_rng([2, seed, number, i]))
            audio = folder / f"an{i:04}-{speaker.name}-b.wav"
            transcript = audio.with_suffix(".txt")
            write_wav(audio, samples)
            transcript.write_text(text + "\n")
            pairs.append((Utterance(audio, text, len(samples) / RATE), transcript))
        manifests.append((Path(out) / f"spoken_{part}_manifest.csv", pairs))
    first, second = (write_manifest(path, pairs) for path, pairs in manifests)
    return first, second


def _cast(part: str, count: int, seed: int) -> list[tuple[Speaker, str]]:
    """Who says what: speakers take turns, each with sentences of their own."""
    stream = list(VOICES).index(part)
    speakers = [
        _speaker(part, i, default_rng([0, seed, stream, i]))
        for i in range(-(-count // PER_SPEAKER[part]))
    ]
    return [
        (speakers[i % len(speakers)], sentence(default_rng([1, seed, stream, i])))
        for i in range(count)
    ]


def _speaker(part: str, number: int, chance: Generator) -> Speaker:
    """Voices in turn, so that all are heard; accent, pitch and speed by chance."""
    variant = VOICES[part][number % len(VOICES[part])]
    accent = str(chance.choice(list(ACCENTS)))
    return Speaker(
        name=f"{variant.lower()}_{accent}_{number}",
        voice=f"{ACCENTS[accent]}+{variant}",
        speed=int(chance.integers(130, 191)),
        pitch=int(chance.integers(35, 66)),
        range=int(chance.integers(30, 71)),
        gap=int(chance.integers(1, 6)),
    )


def _say(requests: list[dict[str, Any]]) -> list[np.ndarray]:
    """Samples at 16 kHz for each request, from one fresh process."""
    loader = extra("espeakng_loader")
    with TemporaryDirectory() as folder:
        data = Path(loader.get_data_path())
        if len(str(data).encode()) > LONGEST_PATH:
            short = Path(folder) / "espeak-ng-data"
            short.symlink_to(data, target_is_directory=True)
            data = short
        command = [sys.executable, "-I", voice.__file__, loader.get_library_path(), str(data)]
        lines = "".join(json.dumps(request) + "\n" for request in requests)
        done = subprocess.run(command, input=lines.encode(), capture_output=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise DataError([reason[-1] if reason else f"espeak-ng ended with {done.returncode}"])
    return _sounds(done.stdout)


def _sounds(answers: bytes) -> list[np.ndarray]:
    sounds, place = [], 0
    while place < len(answers):
        rate, count = np.frombuffer(answers, "<i4", 2, place)
        samples = np.frombuffer(answers, np.int16, count, place + 8)
        sounds.append(resample(samples / 32_768, int(rate)))
        place += 8 + 2 * int(count)
    return sounds


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """Samples at 16 kHz: the spectrum, cut at 8 kHz.

    Padded so that both lengths are whole, and products of small numbers: transforms of others
    take ten times as long.
    """
    unit = 32 * rate // np.gcd(rate, RATE)
    padded = -(-len(samples) // unit) * unit
    length = padded * RATE // rate
    spectrum = np.fft.rfft(samples, padded)[: length // 2 + 1]
    whole = np.fft.irfft(spectrum, length) * (length / padded)
    return whole[: len(samples) * RATE // rate]


def _room(samples: np.ndarray, chance: Generator) -> np.ndarray:
    """Put speech into a recording: silence around it, a level, white to pink noise."""
    before, after = chance.integers(RATE // 10, RATE // 4, 2)
    loudness = chance.uniform(0.2, 0.7) / np.abs(samples).max()
    speech = np.pad(samples * loudness, (before, after))
    power = np.square(samples * loudness).mean() / 10 ** (chance.uniform(20, 35) / 10)
    length = 1 << (len(speech) - 1).bit_length()
    spectrum = np.fft.rfft(chance.standard_normal(length))
    spectrum[1:] *= np.arange(1, len(spectrum)) ** -chance.uniform(0, 0.5)
    noise = np.fft.irfft(spectrum, length)[: len(speech)]
    return speech + noise * np.sqrt(power / np.square(noise).mean())
