# SPDX-License-Identifier: Apache-2.0
"""Decoding, against all alignments written out."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby, product

import pytest
import torch

from oktopk.lab.tasks.speech.recordings import LABELS, decode, encode
from oktopk.lab.tasks.speech.task import beam, greedy


def scores(text: str) -> torch.Tensor:
    """Log probabilities whose likeliest letters spell the text, frame by frame."""
    frames = torch.full((len(text), 1, len(LABELS)), -9.0)
    for t, letter in enumerate(text):
        frames[t, 0, LABELS.index(letter)] = 0.0
    return frames.log_softmax(-1)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ("HH_EE_L_LLO", "HELLO"),
        ("____", ""),
        ("A_A_A", "AAA"),
        ("AAA", "A"),
        ("_GO  ON_", "GO ON"),
    ],
)
def test_repeats_collapse_and_blanks_go(frames, text):
    lengths = torch.tensor([len(frames)])
    assert greedy(scores(frames), lengths) == [text]
    assert beam(scores(frames), lengths, 8) == [text]


def test_frames_beyond_the_end_are_not_heard():
    assert greedy(scores("AB_CD"), torch.tensor([2])) == ["AB"]
    assert beam(scores("AB_CD"), torch.tensor([2]), 4) == ["AB"]


def test_a_wide_beam_finds_the_likeliest_text():
    """Among letters blank, A and B: every alignment of 5 frames, summed by text."""
    letters = [0, *encode("AB")]
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.full((5, 1, len(LABELS)), -50.0)
        logits[:, 0, letters] = 2 * torch.randn(5, 3, generator=generator)
        log_probs = logits.double().log_softmax(-1)
        total = defaultdict(float)
        for path in product(letters, repeat=5):
            text = decode(letter for letter, _ in groupby(path) if letter)
            total[text] += log_probs[range(5), 0, list(path)].sum().exp().item()
        assert beam(log_probs, torch.tensor([5]), 200) == [max(total, key=total.__getitem__)]
