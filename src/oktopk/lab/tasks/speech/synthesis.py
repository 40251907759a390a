# SPDX-License-Identifier: Apache-2.0
"""A corpus like AN4 from a speech synthesizer: no download, and one seed gives the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import numpy as np
from numpy.random import default_rng

from oktopk.lab.tasks.speech import espeak
from oktopk.lab.tasks.speech.recordings import (
    RATE,
    DataError,
    Utterance,
    extra,
    write_manifest,
    write_wav,
)
from oktopk.utils.console import TimeLeft

# A grammar of sentences like those in AN4: digits, dates, spelled names, commands.


# ruff: noqa: SIM905 (lists of words are easier to read as text)


DIGITS = "ZERO ONE TWO THREE FOUR FIVE SIX SEVEN EIGHT NINE".split()
TEENS = "TEN ELEVEN TWELVE THIRTEEN FOURTEEN FIFTEEN SIXTEEN SEVENTEEN EIGHTEEN NINETEEN".split()
TENS = "TWENTY THIRTY FORTY FIFTY SIXTY SEVENTY EIGHTY NINETY".split()
MONTHS = (
    "JANUARY FEBRUARY MARCH APRIL MAY JUNE JULY AUGUST SEPTEMBER OCTOBER NOVEMBER DECEMBER".split()
)
ORDINALS = (
    "FIRST SECOND THIRD FOURTH FIFTH SIXTH SEVENTH EIGHTH NINTH TENTH ELEVENTH TWELFTH THIRTEENTH "
    "FOURTEENTH FIFTEENTH SIXTEENTH SEVENTEENTH EIGHTEENTH NINETEENTH TWENTIETH"
).split()
COMMANDS = "YES NO GO HELP STOP START REPEAT".split()
NAMES = (
    "ANNA BEN CLARA DAVID EMMA FRANK GRACE HUGO IRIS JACK KATE LEON MARIA NINA OSCAR PAULA QUINN "
    "ROSE SAM TINA URSULA VICTOR WENDY XENIA YVES ZOE ADAMS BAKER COX DIXON EVANS FOX GRAY HILL "
    "JONES KLEIN LOPEZ MOORE NOVAK OWENS PRICE RUIZ SMITH TAYLOR VANCE WOOD YOUNG AKRON BOSTON "
    "DALLAS ERIE HILO JOLIET LIMA MIAMI OMAHA PITTSBURGH RENO TULSA WACO"
).split()
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def sentence(chance: np.random.Generator) -> str:
    """A random sentence. Zero is never read as "oh", which would sound like the letter O."""
    return RULES[int(chance.choice(len(RULES), p=WEIGHTS))][1](chance)


def digits(chance: np.random.Generator, shortest: int = 2, longest: int = 5) -> str:
    """A house number, a zip code, a part of a telephone number."""
    return " ".join(_pick(chance, DIGITS) for _ in range(chance.integers(shortest, longest + 1)))


def number(chance: np.random.Generator) -> str:
    """FORTY SEVEN, TWELVE, SIXTY."""
    tens, unit = _pick(chance, TENS), _pick(chance, DIGITS[1:])
    return _pick(chance, [f"{tens} {unit}", f"{tens} {unit}", tens, _pick(chance, TEENS)])


def date(chance: np.random.Generator) -> str:
    """JANUARY TWENTY SEVENTH, sometimes with a year; MAY SEVEN."""
    day = _pick(chance, ORDINALS)
    if chance.random() < 0.3:
        day = _pick(chance, ["TWENTY", "TWENTY", "THIRTY"]) + " "
        day += "FIRST" if day == "THIRTY " else _pick(chance, ORDINALS[:9])
    year = f" NINETEEN {number(chance)}" if chance.random() < 0.2 else ""
    return f"{_pick(chance, MONTHS)} {day}{year}"


def spelled(chance: np.random.Generator) -> str:
    """A name, letter by letter."""
    return " ".join(_pick(chance, NAMES))


def entered(chance: np.random.Generator) -> str:
    """ENTER SIX TWO FOUR, ENTER NINETY SEVEN."""
    return "ENTER " + _pick(chance, [digits, number])(chance)


def erased(chance: np.random.Generator) -> str:
    """RUBOUT T M N SEVEN: letters that make no word."""
    letters = " ".join(_pick(chance, LETTERS) for _ in range(chance.integers(2, 5)))
    return f"{_pick(chance, ['RUBOUT', 'ERASE'])} {letters} {digits(chance, 1, 2)}"


def command(chance: np.random.Generator) -> str:
    """GO."""
    return _pick(chance, COMMANDS)


def _pick(chance: np.random.Generator, items):  # noqa: ANN001, ANN202 - any sequence, its element
    return items[int(chance.integers(len(items)))]


# Weights in percent: many sentences that are quick to learn, and enough letters to tell apart.
RULES: list[tuple[int, Callable[[np.random.Generator], str]]] = [
    (12, command),
    (20, digits),
    (8, number),
    (20, date),
    (16, entered),
    (14, spelled),
    (10, erased),
]
WEIGHTS = [weight / 100 for weight, _ in RULES]


# ruff: noqa: SIM905 (lists of words are easier to read as text)


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
# No voice is in both lists, so the test set has unknown speakers.
VOICES = {
    "train": "m1 m2 m3 m4 m6 m8 f1 f2 f4 f5 Andrea adam belinda david edward steph".split(),
    "val": "m7 f3 linda Michael paul".split(),
}
PER_SPEAKER = {"train": 13, "val": 10}  # utterances, as in AN4

# How espeak-ng is told to read them: it takes "A" for an article, and "Z" depends on the accent.
SPOKEN = {"A": "[['eI]]", "Z": "zee", "RUBOUT": "rub-out"}
MAX_PATH_BYTES = 140  # espeak-ng truncates longer paths


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice of the synthesizer with its own pitch and speed."""

    name: str
    voice: str
    speed: int
    pitch: int
    range: int
    gap: int
    """Tens of milliseconds between words."""

    def request(self, text: str) -> dict[str, Any]:
        spoken = " ".join(SPOKEN.get(word, word.lower()) for word in text.split())
        parameters = {name: getattr(self, name) for name in ("voice", *espeak.PARAMETERS)}
        return parameters | {"text": spoken}


def synthesize_corpus(
    out: str | Path, train: int = TRAIN, test: int = TEST, seed: int = SEED
) -> tuple[Path, Path]:
    """Synthesize a corpus in `out` and return its two manifests. The defaults take seconds.

    Training and test have different speakers. Every recording has noise, at 20 to 35 dB.
    """
    if min(train, test) < 1:
        raise DataError([f"cannot speak {train} training and {test} test utterances: one at least"])
    if max(train, test) > MOST:
        raise DataError([f"cannot speak {max(train, test):.0e} utterances: at most {MOST:,}"])
    if seed < 0:
        raise DataError([f"the seed must not be negative, got {seed}"])
    parts = [_script("train", train, seed), _script("val", test, seed)]
    sounds = _synthesize([speaker.request(text) for part in parts for speaker, text in part])
    manifests = []
    with closing(sounds), TimeLeft("utterances spoken", train + test) as progress:
        for number, (part, lines) in enumerate(zip(("train", "val"), parts, strict=True)):
            folder = Path(out) / part
            folder.mkdir(parents=True, exist_ok=True)
            pairs = []
            for i, (speaker, text) in enumerate(lines):
                samples = _add_noise(next(sounds), default_rng([2, seed, number, i]))
                audio = folder / f"an{i:04}-{speaker.name}-b.wav"
                pairs.append(_write(audio, samples, text))
                progress(number * train + i + 1)
            manifests.append((Path(out) / f"spoken_{part}_manifest.csv", pairs))
    first, second = (write_manifest(path, pairs) for path, pairs in manifests)
    return first, second


def _write(audio: Path, samples: np.ndarray, text: str) -> tuple[Utterance, Path]:
    transcript = audio.with_suffix(".txt")
    write_wav(audio, samples)
    transcript.write_text(text + "\n")
    return Utterance(audio, text, len(samples) / RATE), transcript


def _script(part: str, count: int, seed: int) -> list[tuple[Speaker, str]]:
    """The speaker and the sentence of every utterance. Speakers take turns."""
    stream = list(VOICES).index(part)
    speakers = [
        _speaker(part, i, default_rng([0, seed, stream, i]))
        for i in range(-(-count // PER_SPEAKER[part]))
    ]
    return [
        (speakers[i % len(speakers)], sentence(default_rng([1, seed, stream, i])))
        for i in range(count)
    ]


def _speaker(part: str, number: int, chance: np.random.Generator) -> Speaker:
    """The next voice of the list, so that all are used, with random accent, pitch and speed."""
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


def _synthesize(requests: list[dict[str, Any]]) -> Generator[np.ndarray, None, None]:
    """Yield samples at 16 kHz for each request, from a new process; see `espeak` for the reason."""
    loader = extra("espeakng_loader")
    with TemporaryDirectory() as folder:
        data = Path(loader.get_data_path())
        if len(str(data).encode()) > MAX_PATH_BYTES:
            short = Path(folder) / "espeak-ng-data"
            short.symlink_to(data, target_is_directory=True)
            data = short
        command = [sys.executable, "-I", espeak.__file__, loader.get_library_path(), str(data)]
        asked, said = Path(folder) / "requests", Path(folder) / "errors"
        asked.write_text("".join(json.dumps(request) + "\n" for request in requests))
        with asked.open("rb") as input, said.open("wb") as errors:
            process = subprocess.Popen(command, stdin=input, stdout=subprocess.PIPE, stderr=errors)
        with process:
            assert process.stdout is not None
            try:
                yield from _decode(process.stdout)
            except BaseException:  # nobody takes the rest
                process.kill()
                raise
        if process.returncode != 0:
            reason = said.read_text(errors="replace").strip().splitlines()
            raise DataError(
                [reason[-1] if reason else f"espeak-ng ended with {process.returncode}"]
            )


def _decode(answers: IO[bytes]) -> Iterator[np.ndarray]:
    """Yield the answers of `espeak` as samples at 16 kHz, as they come."""
    while len(header := answers.read(8)) == 8:
        rate, count = map(int, np.frombuffer(header, "<i4", 2))
        samples = answers.read(2 * count)
        if len(samples) < 2 * count:  # the process was killed: its exit code says so
            return
        yield resample(np.frombuffer(samples, np.int16) / 32_768, rate)


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """Resample to 16 kHz by cutting the spectrum at 8 kHz.

    The input is padded so that both lengths are integers with small prime factors. Fourier
    transforms of other lengths take ten times as long.
    """
    unit = 32 * rate // np.gcd(rate, RATE)
    padded = -(-len(samples) // unit) * unit
    length = padded * RATE // rate
    spectrum = np.fft.rfft(samples, padded)[: length // 2 + 1]
    whole = np.fft.irfft(spectrum, length) * (length / padded)
    return whole[: len(samples) * RATE // rate]


def _add_noise(samples: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """Add silence before and after, set the level, and add white to pink noise."""
    before, after = chance.integers(RATE // 10, RATE // 4, 2)
    loudness = chance.uniform(0.2, 0.7) / np.abs(samples).max()
    speech = np.pad(samples * loudness, (before, after))
    power = np.square(samples * loudness).mean() / 10 ** (chance.uniform(20, 35) / 10)
    length = 1 << (len(speech) - 1).bit_length()
    spectrum = np.fft.rfft(chance.standard_normal(length))
    spectrum[1:] *= np.arange(1, len(spectrum)) ** -chance.uniform(0, 0.5)
    noise = np.fft.irfft(spectrum, length)[: len(speech)]
    return speech + noise * np.sqrt(power / np.square(noise).mean())
