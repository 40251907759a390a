# SPDX-License-Identifier: Apache-2.0
"""Characters and their numbers: the 29 labels of the original code, the blank first."""

from __future__ import annotations

from collections.abc import Iterable

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
