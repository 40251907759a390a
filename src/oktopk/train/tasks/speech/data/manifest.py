# SPDX-License-Identifier: Apache-2.0
"""Manifests: lines of `recording,transcript file`, paths relative to the manifest."""

from __future__ import annotations

import csv
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path

from oktopk.train.tasks.speech.data.audio import duration, read_audio, silent
from oktopk.train.tasks.speech.data.labels import unknown
from oktopk.train.tasks.speech.data.problems import DataError
from oktopk.utils.files import (
    FileError,
    is_file,
    read_text,
    single_line,
)

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
