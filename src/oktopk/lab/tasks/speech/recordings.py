# SPDX-License-Identifier: Apache-2.0
"""Recordings and manifests: samples, transcripts, labels, and checks of all of them."""

from __future__ import annotations

import csv
import os
import re
import tempfile
import wave
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from oktopk.utils.extras import require
from oktopk.utils.files import FileError, is_file, read_text, single_line

# `DataError`: all problems with the data in one message, before training starts.


SHOWN = 20


class DataError(FileError):
    """Data that cannot be trained on. `problems` has one line for each thing to repair."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__(self._message())

    def _message(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = [f"{len(self.problems)} problems with the data:"]
        lines += [f"  {problem}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  ... and {len(self.problems) - SHOWN} more")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[type[DataError], tuple[list[str]]]:
        return DataError, (self.problems,)  # so that it crosses processes


def extra(module: str) -> Any:
    """A module of the `train` extra, or an error that says how to install it."""
    require("reading and writing recordings", module)
    return import_module(module)


# One recording as 16 kHz mono samples in [-1, 1), and checks of its file.
#
# libsndfile reads WAV, FLAC and NIST sphere. It accepts a file that ends early, so the size in the
# header is compared with the file first.


RATE = 16_000
FULL_SCALE = 32_768
SILENCE = 2 / FULL_SCALE  # a recording is silent if no sample is further from the mean
SHORTEST = 320  # samples in one window of the spectrogram
LONGEST = 3600 * RATE  # samples of all channels, which are decoded at once
BYTE_ORDERS = {"big": ">i2", "little": "<i2"}


def duration(path: Path) -> float:
    """Seconds of a recording. Reads only the header, and raises if it shows a problem."""
    return _header(path).frames / RATE


def read_audio(path: Path) -> np.ndarray:
    """Samples as float32 in [-1, 1); several channels are averaged."""
    info = _header(path)
    sound = extra("soundfile")
    try:
        samples, _ = sound.read(path, dtype="float32", always_2d=True)
    except (sound.SoundFileError, RuntimeError, ValueError, MemoryError) as error:
        raise DataError([f"{path} cannot be decoded ({error}): copy it again"]) from error
    if len(samples) < info.frames:
        message = f"{path} is truncated: {len(samples)} of {info.frames} samples; copy it again"
        raise DataError([message])
    return samples.mean(axis=1)


def read_raw(path: Path, byte_order: str) -> np.ndarray:
    """Samples of a headerless 16-bit file as float32 in [-1, 1)."""
    if is_file(path) and path.stat().st_size > 2 * LONGEST:
        raise DataError([f"{path} has more than {LONGEST} samples: cut it into utterances"])
    data = path.read_bytes() if is_file(path) else None
    if problem := _size_problem(path, data):
        raise DataError([problem])
    return np.frombuffer(data or b"", BYTE_ORDERS[byte_order]).astype(np.float32) / FULL_SCALE


def silent(samples: np.ndarray) -> bool:
    """Whether nothing was recorded. A constant offset counts as silence."""
    return bool(np.abs(samples - samples.mean()).max() <= SILENCE)


def write_wav(path: Path, samples: np.ndarray) -> None:
    """Write 16-bit PCM. Samples that were read from 16 bits are written unchanged."""
    whole = np.clip(np.rint(samples * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1)
    with wave.open(str(path), "wb") as file:  # soundfile would wait for the disk each time
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(whole.astype("<i2").tobytes())


def byte_order(paths: Iterable[Path]) -> str:
    """The byte order of headerless 16-bit speech, detected from several files.

    Neighbouring samples of speech are similar; with swapped bytes they look random. So the right
    order is the one whose differences have less energy relative to the samples.
    """
    paths = list(paths)
    roughness = {name: _roughness(paths, kind) for name, kind in BYTE_ORDERS.items()}
    best = min(roughness, key=lambda name: roughness[name])
    if not 1.5 * roughness[best] < max(roughness.values()):
        message = (
            f"{paths[0] if paths else 'raw files'}: neither byte order looks like 16-bit speech "
            f"(roughness {roughness['big']:.2f} and {roughness['little']:.2f}, looked at "
            f"{len(paths)} files): the files must be 16 kHz 16-bit PCM without header"
        )
        raise DataError([message])
    return best


def _roughness(paths: list[Path], kind: str) -> float:
    ratios = []
    for path in paths:
        data = path.read_bytes()
        samples = np.frombuffer(data[: len(data) & ~1], kind).astype(np.float64)
        samples = samples - samples.mean() if len(samples) else samples
        if energy := float(np.square(samples).sum()):
            ratios.append(float(np.square(np.diff(samples)).sum()) / energy)
    return float(np.median(ratios)) if ratios else 0.0


def _header(path: Path) -> Any:
    if not is_file(path):
        raise DataError([f"{single_line(path)} is missing"])
    if path.stat().st_size == 0:
        raise DataError([f"{path} is empty: copy it again"])
    if path.suffix == ".raw":
        raise DataError([f"{path} has no header: `oktopk data an4` makes WAV files of raw ones"])
    sound = extra("soundfile")
    try:
        info = sound.info(path)
    except (sound.SoundFileError, RuntimeError, ValueError) as error:
        raise DataError([f"{path} is not a WAV, FLAC or sphere file ({error})"]) from error
    promised, size = _promised_bytes(path), path.stat().st_size
    if promised > size:
        raise DataError([f"{path} is truncated: {size} of {promised} bytes; copy it again"])
    if info.samplerate != RATE:
        message = f"{path} has {info.samplerate} samples per second: resample it to {RATE}"
        raise DataError([message])
    if info.frames * info.channels > LONGEST:
        message = f"{path} has {info.frames} samples, more than an hour: cut it into utterances"
        raise DataError([message])
    if info.frames < SHORTEST:
        message = f"{path} has {info.frames} samples: at least {SHORTEST} make one spectrum"
        raise DataError([message])
    return info


def _size_problem(path: Path, data: bytes | None) -> str | None:
    if data is None:
        return f"{path} is missing"
    if not data:
        return f"{path} is empty: copy it again"
    if len(data) % 2:
        return f"{path} is truncated: {len(data)} bytes are no whole number of 16-bit samples"
    if len(data) < 2 * SHORTEST:
        return f"{path} has {len(data) // 2} samples: at least {SHORTEST} make one spectrum"
    return None


def _promised_bytes(path: Path) -> int:
    """The file size according to the header; 0 if the header does not say."""
    with path.open("rb") as file:
        start = file.read(12)
        if start[:4] == b"RIFF" and start[8:] == b"WAVE":
            while len(chunk := file.read(8)) == 8:
                length = int.from_bytes(chunk[4:], "little")
                if chunk[:4] == b"data":
                    # programs that do not know the length yet write 2^32 - 1 or 0
                    return 0 if length in (0, 2**32 - 1) else file.tell() + length
                file.seek(length + length % 2, 1)
        elif start[:7] == b"NIST_1A":
            return _sphere_bytes(start + file.read(4096))
    return 0


def _sphere_bytes(start: bytes) -> int:
    """Header plus samples of a NIST sphere file: lines of `name -type value` up to `end_head`."""
    lines = start.split(b"end_head")[0].decode("ascii", "replace").splitlines()
    fields = {"channel_count": "1"}
    fields |= {words[0]: words[2] for line in lines[2:] if len(words := line.split(None, 2)) == 3}
    names = ("sample_count", "sample_n_bytes", "channel_count")
    sizes = [fields.get(name, "?").strip() for name in names]
    sizes += [line.strip() for line in lines[1:2]]  # of the header itself
    if len(sizes) < 4 or not all(re.fullmatch("[0-9]{1,12}", size) for size in sizes):
        return 0
    count, width, channels, header = map(int, sizes)
    return header + count * width * channels


# Characters and their numbers: the 29 labels of the original code, the blank first.


LABELS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
BLANK = 0

_NUMBERS = {character: number for number, character in enumerate(LABELS) if number != BLANK}


def unknown(text: str) -> str:
    """The characters of `text` without a label, each once, sorted. The blank has none here."""
    return "".join(sorted(set(text) - _NUMBERS.keys()))


def encode(text: str) -> list[int]:
    """The labels of a transcript. An unknown character is an error, never dropped."""
    if strange := unknown(text):
        raise ValueError(f"no label for {strange!r} in the transcript {text!r}")
    return [_NUMBERS[character] for character in text]


def decode(numbers: Iterable[int]) -> str:
    """The characters of labels, including repeats and blanks."""
    return "".join(LABELS[number] for number in numbers)


# Manifests: lines of `recording,transcript file`, paths relative to the manifest.


PRUNE = (1.0, 15.0)  # seconds of the shortest and longest recording the reference trains on
# Outputs per second that a transcript must fit in: 100 spectra, of which a convolution keeps every
# second, spoken at the fastest augmented tempo.
OUTPUTS = 100 / 2 / 1.15


@dataclass(frozen=True, slots=True)
class Utterance:
    """A recording and what is said in it."""

    audio: Path
    text: str
    seconds: float


def read_manifest(path: str | Path) -> list[Utterance]:
    """The utterances of a manifest, shortest first.

    Reads the header of every recording, and every transcript. All problems are raised in one
    `DataError`, with file and line.
    """
    path = Path(path)
    utterances, problems = [], []
    for number, row in rows(path):
        try:
            utterances.append(_utterance(path.parent, row))
        except DataError as error:
            problems += [f"{path}:{number}: {problem}" for problem in error.problems]
    if problems:
        raise DataError(problems)
    return by_duration(utterances)


def rows(path: Path) -> list[tuple[int, list[str]]]:
    """The line numbers and cells of a manifest; empty lines are left out."""
    if not is_file(path):
        raise DataError(
            [f"{single_line(path)} is missing: `oktopk data an4` or `oktopk data speak` makes one"]
        )
    try:
        reader = csv.reader(StringIO(read_text(path), newline=""))
        found = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except (FileError, csv.Error) as error:
        raise DataError([f"{path} is not a list in UTF-8: {error}"]) from error
    if not found:
        raise DataError([f"{path} lists nothing"])
    return found


def write_manifest(path: str | Path, pairs: Iterable[tuple[Utterance, Path]]) -> Path:
    """Write a manifest of utterances and their transcripts, shortest first, in one rename."""
    path = Path(path)
    ordered = sorted(pairs, key=lambda pair: _order(pair[0]))
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, newline="", encoding="utf-8", delete=False
    ) as file:
        csv.writer(file, lineterminator="\n").writerows(
            [_relative(utterance.audio, path), _relative(text, path)] for utterance, text in ordered
        )
    Path(file.name).chmod(0o644)
    os.replace(file.name, path)
    return path


def check(
    train: list[Utterance],
    test: list[Utterance],
    *,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Raise a `DataError` with all problems that would otherwise stop training later.

    Decodes every recording: about a second for AN4. `advance` is called after each of them.
    """
    problems = []
    for utterance in (*train, *test):
        problems += _problems(utterance)
        advance()
    for name, utterances in (("training", train), ("test", test)):
        if not utterances:
            problems.append(f"the {name} list is empty")
        seen = Counter(utterance.audio.resolve() for utterance in utterances)
        problems += [
            f"{path} is {count} times in the {name} list"
            for path, count in seen.items()
            if count > 1
        ]
    speakers, heard = ({speaker(u.audio) or "" for u in part} - {""} for part in (train, test))
    problems += [
        f"speaker {name} is in the training list and in the test list: the test would not be of "
        "unknown voices; remove the lines from one of them"
        for name in sorted(speakers & heard)
    ]
    both = {u.audio.resolve() for u in train} & {u.audio.resolve() for u in test}
    problems += [f"{path} is in the training list and in the test list" for path in sorted(both)]
    if problems:
        raise DataError(problems)


def _problems(utterance: Utterance) -> list[str]:
    """Problems of one utterance: silence, unknown characters, or too much text for its duration."""
    path, text = utterance.audio, utterance.text
    problems = []
    try:
        if silent(read_audio(path)):
            problems.append(f"{path} is silent: remove its line or record it again")
    except DataError as error:
        problems += error.problems
    if not text:
        problems.append(f"{path} has an empty transcript: remove its line")
    if strange := unknown(text):
        problems.append(f"{path}: no label for {strange!r} in its transcript {text!r}")
    needed = len(text) + sum(
        a == b for a, b in pairwise(text)
    )  # CTC needs a blank between equal neighbours
    if needed > utterance.seconds * OUTPUTS:
        problems.append(
            f"{path}: {utterance.seconds:.2f} s are too short for its transcript {text!r}: "
            f"it needs {needed / OUTPUTS:.2f} s at least"
        )
    return problems


def by_duration(utterances: Iterable[Utterance]) -> list[Utterance]:
    """Sort by duration, then by path, so that every machine has the same order."""
    return sorted(utterances, key=_order)


def pruned(utterance: Utterance) -> bool:
    """Whether the original code leaves the utterance out of training: under 1 s or over 15 s."""
    shortest, longest = PRUNE
    return not shortest <= utterance.seconds <= longest


def find_manifests(folder: str | Path) -> tuple[Path, Path]:
    """The training and the test manifest in a folder, whatever their prefix (`an4_...`)."""
    folder = Path(folder)
    found = []
    for names in (["train"], ["val", "test"]):
        paths = [p for name in names for p in sorted(folder.glob(f"*{name}_manifest.csv"))]
        if len(paths) != 1:
            what = " or ".join(f"*{name}_manifest.csv" for name in names)
            seen = ", ".join(p.name for p in paths) or "none"
            raise DataError([f"{folder} must have one file {what}; it has {seen}"])
        found.append(paths[0])
    return found[0], found[1]


def speaker(path: Path) -> str | None:
    """The speaker, if the file is named as in AN4 (`an251-fash-b`, `cen1-fash-b`)."""
    named = re.fullmatch(r"[a-z]+\d+-(\w+)-\w+", path.stem)
    return named[1] if named else None


def clean(text: str) -> str:
    """A transcript in capitals with single spaces."""
    return " ".join(text.upper().split())


def _order(utterance: Utterance) -> tuple[float, str]:
    return utterance.seconds, utterance.audio.as_posix()


def _relative(target: Path, manifest: Path) -> str:
    return Path(os.path.relpath(target.resolve(), manifest.parent.resolve())).as_posix()


def _utterance(folder: Path, row: list[str]) -> Utterance:
    if len(row) != 2:
        raise DataError([f"expected `recording,transcript`, found {len(row)} cells"])
    audio, transcript = (folder / cell for cell in row)
    problems = []
    seconds, text = 0.0, ""
    try:
        seconds = duration(audio)
    except DataError as error:
        problems += [_with_hint(row[0], problem) for problem in error.problems]
    if is_file(transcript):
        try:
            text = clean(read_text(transcript))
        except FileError as error:
            problems.append(str(error))
    else:
        problems.append(_with_hint(row[1], f"{single_line(transcript)} is missing"))
    if problems:
        raise DataError(problems)
    return Utterance(audio, text, seconds)


def _with_hint(cell: str, problem: str) -> str:
    if not problem.endswith("is missing") or not Path(cell).is_absolute():
        return problem
    return f"{problem} (an absolute path of another machine? `oktopk data fix-manifest` repairs it)"
