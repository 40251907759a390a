# SPDX-License-Identifier: Apache-2.0
"""Decode log probabilities of characters by frame to text: greedy, or by prefix beam search."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oktopk.train.tasks.speech.data.labels import BLANK, decode


def greedy(log_probs: Tensor, lengths: Tensor) -> list[str]:
    """Take the likeliest character of each frame of (T, N, 29); drop repeats, then blanks."""
    best = log_probs.argmax(-1).T.cpu()
    return [_collapse(row[:length]) for row, length in zip(best, lengths.tolist(), strict=True)]


def _collapse(letters: Tensor) -> str:
    merged = torch.unique_consecutive(letters)
    return decode(merged[merged != BLANK].tolist())


def beam(log_probs: Tensor, lengths: Tensor, width: int) -> list[str]:
    """The likeliest text of each utterance, summed over its alignments, among `width` prefixes.

    O(T width 29) per utterance in plain Python: for validation, not for training.
    """
    return [
        _beam_one(log_probs[:length, i].double().cpu().tolist(), width)
        for i, length in enumerate(lengths.tolist())
    ]


def _beam_one(frames: list[list[float]], width: int) -> str:
    # prefix -> log probability that it ends in (a blank, its last letter)
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}
    for frame in frames:
        grown: dict[tuple[int, ...], list[float]] = {}
        for prefix, ends in beams.items():
            _grow(grown, prefix, ends, frame)
        ranked = sorted(grown.items(), key=lambda item: -_add(*item[1]))
        beams = {prefix: (blank, letter) for prefix, (blank, letter) in ranked[:width]}
    best = max(beams.items(), key=lambda item: _add(*item[1]))
    return decode(list(best[0]))


def _grow(
    grown: dict[tuple[int, ...], list[float]],
    prefix: tuple[int, ...],
    ends: tuple[float, float],
    frame: list[float],
) -> None:
    """Add the prefixes that one frame leads to: the same text, or one character more."""
    blank, letter = ends
    whole = _add(blank, letter)
    same = grown.setdefault(prefix, [-math.inf, -math.inf])
    same[0] = _add(same[0], whole + frame[BLANK])
    if prefix:
        same[1] = _add(same[1], letter + frame[prefix[-1]])
    for index in range(1, len(frame)):
        longer = grown.setdefault((*prefix, index), [-math.inf, -math.inf])
        # the same character twice in a row needs a blank between
        before = blank if prefix and prefix[-1] == index else whole
        longer[1] = _add(longer[1], before + frame[index])


def _add(a: float, b: float) -> float:
    """log(exp a + exp b)."""
    high, low = (a, b) if a >= b else (b, a)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
