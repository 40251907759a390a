# SPDX-License-Identifier: Apache-2.0
"""The text of the task as numbers, one for each different character."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oktopk.train.tasks.text.options import TextOptions
from oktopk.utils.files import FileError, file_error, read_text

MOST_BYTES = 2**28
"""Largest text in bytes. Every rank has it in memory."""
TENTH = 10
"""Every tenth file, or the last tenth of a text, is for validation."""
NUM_CODE_POINTS = 0x110000
STDLIB = "the standard library"
OTHER = "\ufffd"
"""Stands for every character of the standard library's source that is not ASCII."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text to train on and one to validate with, as indices into `characters`."""

    characters: str
    """All different characters in both texts, in the order of their code points."""

    train: Tensor
    validation: Tensor

    def decode(self, tokens: Tensor) -> str:
        """The text of some tokens."""
        return "".join(self.characters[i] for i in tokens.tolist())


def read_corpus(options: TextOptions) -> Corpus:
    """Read the text and check that it suits the options. FileError says in one line if not."""
    where = options.data or STDLIB
    texts = _read_texts(options.data)
    train, validation = _split(texts)
    needed = options.context + 1  # a crop, and the character after it
    if len(texts) < TENTH and len(validation) < needed:
        found, least = len(train) + len(validation), TENTH * options.context + 1
        raise _too_short(where, found, least, options.context)
    if min(len(train), len(validation)) < needed:
        part = "the files for validation" if len(validation) < needed else "the files for training"
        found = min(len(train), len(validation))
        raise _too_short(f"{where}: {part}", found, needed, options.context)
    corpus = _encode(train, validation)
    if options.vocabulary and options.vocabulary < len(corpus.characters):
        raise file_error(
            where,
            f"has {len(corpus.characters)} different characters, and vocabulary is "
            f"{options.vocabulary}",
            advice="raise vocabulary, or set it to 0",
        )
    return corpus


def _too_short(where: str, found: int, least: int, context: int) -> FileError:
    return file_error(
        where,
        f"has {found} characters, and a context of {context} needs at least {least}",
        advice="use a longer text or a smaller context",
    )


def _read_texts(data: str) -> list[str]:
    """The text of one file, or of every file in a folder."""
    path = Path(data)
    if not data:
        source = Path(sysconfig.get_paths()["stdlib"])
        return _read_files(sorted(source.glob("*.py")), _read_ascii)
    if not path.exists():
        raise file_error(data, "there is no such file", advice="give a text file to --data")
    if not path.is_dir():
        return [read_text(path, MOST_BYTES)]
    files = sorted(path.rglob("*.txt"))
    if not files:
        raise file_error(data, "has no *.txt in it", advice="give a text file, or a folder of them")
    return _read_files(files, lambda file: read_text(file, MOST_BYTES))


def _read_files(files: list[Path], read: Callable[[Path], str]) -> list[str]:
    texts, total = [], 0
    for file in files:
        texts.append(read(file))
        total += len(texts[-1])
        if total > MOST_BYTES:
            raise file_error(file.parent, f"has more than {MOST_BYTES} characters")
    return texts


def _read_ascii(file: Path) -> str:
    """A file of the standard library. Some of its files have single characters of many scripts."""
    text = file.read_bytes().decode("utf-8", "replace")
    return text if text.isascii() else "".join(c if c.isascii() else OTHER for c in text)


def _split(texts: list[str]) -> tuple[str, str]:
    """The text to train on, and the one to validate with.

    Of many files every tenth is for validation. Few files are one text, and its last tenth is.
    """
    if len(texts) >= TENTH:
        others = (text for i, text in enumerate(texts) if i % TENTH)
        return "".join(others), "".join(texts[::TENTH])
    whole = "".join(texts)
    cut = len(whole) * (TENTH - 1) // TENTH
    return whole[:cut], whole[cut:]


def _encode(train: str, validation: str) -> Corpus:
    points = [np.frombuffer(text.encode("utf-32-le"), np.uint32) for text in (train, validation)]
    present = np.zeros(NUM_CODE_POINTS, bool)
    for some in points:
        present[some] = True
    known = np.flatnonzero(present)
    kind = np.uint8 if len(known) <= 256 else np.int32
    numbers = np.zeros(NUM_CODE_POINTS, kind)
    numbers[known] = np.arange(len(known), dtype=kind)
    tokens = [torch.from_numpy(numbers[some]) for some in points]
    return Corpus("".join(map(chr, known)), *tokens)
