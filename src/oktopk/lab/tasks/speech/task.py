# SPDX-License-Identifier: Apache-2.0
"""`Speech`: utterances in batches, the CTC loss, and error rates of decoded text."""

from __future__ import annotations

import hashlib
import logging
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import torch
from torch import Tensor, nn

from oktopk.lab.tasks.base import Metric, Samples, Task
from oktopk.lab.tasks.options import SpeechOptions
from oktopk.lab.tasks.speech.features import Batch, collate, open_spectra, plan
from oktopk.lab.tasks.speech.lstman4 import Lstman4, ctc_loss
from oktopk.lab.tasks.speech.recordings import BLANK, check, decode, find_manifests, read_manifest
from oktopk.lab.tasks.speech.synthesis import synthesize_corpus
from oktopk.utils.extras import require

# Decode log probabilities of characters by frame to text: greedy, or by prefix beam search.


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


log = logging.getLogger("oktopk")

DATA = Path("data")


class Speech(Task):
    """lstman4 recognizes utterances. They are numbered by duration, shortest first."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("wer", "WER", best=0),
        Metric("cer", "CER", best=0),
        Metric("val_loss", "validation loss", best=0),
        # mean over utterances of each one's WER, as the original code computed it
        Metric("mean_utterance_wer", "mean WER of utterances", shown=False, best=0),
        Metric("pseudo_accuracy", "1 - WER", higher_is_better=True, shown=False, best=1),
    )
    options_type = SpeechOptions
    unit = "utterances"

    def __init__(self, options: SpeechOptions, seed: int) -> None:
        super().__init__(options, seed)
        folder = _folder(options)
        cache = Path(options.cache) if options.cache else folder / "cache"
        self.train, self.test = (read_manifest(path) for path in find_manifests(folder))
        self.num_train, self.num_test = len(self.train), len(self.test)
        self._train_spectra = open_spectra(self.train, cache)
        self._test_spectra = open_spectra(self.test, cache)
        self._texts: dict[int, str] = {}
        """What the last validation recognized, by utterance."""

    @classmethod
    def check(cls, options: SpeechOptions) -> None:
        if options.data:
            find_manifests(options.data)
        elif not _folder(options).exists():
            require("oktopk train without --data", "espeakng_loader")

    @classmethod
    def prepare(cls, options: SpeechOptions) -> None:
        folder = _folder(options)
        if not options.data and not folder.exists():
            log.info("synthesizing a corpus in %s", folder)
            _synthesize(folder, options)
        corpus = cls(options, 0)  # computes the spectrograms
        check(corpus.train, corpus.test)

    def fingerprint(self) -> str:
        """A hash of names, transcripts and durations; it does not depend on the folder."""
        lines = [f"{u.audio.name}\t{u.text}\t{u.seconds}\n" for u in (*self.train, *self.test)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def describe(self) -> str:
        hours = sum(utterance.seconds for utterance in self.train) / 3600
        return f"{self.num_train} + {self.num_test} utterances ({hours:.2f} h)"

    def build_model(self) -> nn.Module:
        own = self.options
        return Lstman4(
            hidden=own.hidden,
            layers=own.layers,
            bidirectional=own.bidirectional,
            channels=own.channels,
        )

    def steps(self, epoch: int, batch: int, ranks: int) -> list[list[list[int]]]:
        return plan(self.num_train, batch, ranks, epoch, self.seed)

    def train_batch(self, indices: list[int], epoch: int) -> Batch:
        return collate(
            self._train_spectra,
            self.train,
            indices,
            epoch=epoch,
            seed=self.seed,
            augment=self.options.augment,
        )

    def test_batch(self, indices: list[int]) -> Batch:
        return collate(self._test_spectra, self.test, indices, epoch=0, seed=0, augment=False)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        log_probs, lengths = model(batch.inputs, batch.lengths)
        return ctc_loss(log_probs, lengths, batch.targets, batch.target_lengths).mean()

    def evaluate(self, model: nn.Module, batch: Batch) -> Tensor:
        """(loss, word errors, words, character errors, characters) of each utterance.

        The batch has its utterances longest first; rows are in the order of their numbers.
        """
        log_probs, lengths = model(batch.inputs, batch.lengths)
        losses = ctc_loss(log_probs, lengths, batch.targets, batch.target_lengths).tolist()
        width = self.options.beam
        texts = beam(log_probs, lengths, width) if width else greedy(log_probs, lengths)
        rows = {}
        for i, said, heard, loss in zip(batch.ids, batch.texts, texts, losses, strict=True):
            self._texts[i] = heard
            rows[i] = [loss, *errors(said, heard)]
        return torch.tensor([rows[i] for i in sorted(rows)], dtype=torch.float64)

    def summarize(self, rows: Tensor) -> dict[str, float]:
        """Rates of the corpus. WER may exceed 1, because insertions count."""
        total = rows.sum(0).tolist()
        wer = total[1] / total[2]
        return {
            "wer": wer,
            "cer": total[3] / total[4],
            "val_loss": total[0] / len(rows),
            "mean_utterance_wer": (rows[:, 1] / rows[:, 2]).mean().item(),
            "pseudo_accuracy": max(0.0, 1.0 - wer),
        }

    def samples(self, model: nn.Module, number: int) -> Samples:
        """Some of the utterances that this rank recognized, from the shortest to the longest."""
        known = sorted(self._texts)
        chosen = min(number, len(known))
        shown = [known[i * len(known) // chosen] for i in range(chosen)]
        return [{"said": self.test[i].text, "heard": self._texts[i]} for i in shown]


def errors(said: str, heard: str) -> tuple[int, int, int, int]:
    """Word errors, words, character errors, characters of one utterance."""
    import jiwer  # an extra, which only training needs

    words, characters = jiwer.process_words(said, heard), jiwer.process_characters(said, heard)
    return (
        words.substitutions + words.deletions + words.insertions,
        words.substitutions + words.deletions + words.hits,
        characters.substitutions + characters.deletions + characters.insertions,
        characters.substitutions + characters.deletions + characters.hits,
    )


def _folder(options: SpeechOptions) -> Path:
    """The folder with the manifests. A synthesized corpus is used again by later runs."""
    name = f"spoken-{options.spoken_train}-{options.spoken_test}"
    return Path(options.data) if options.data else DATA / name


def _synthesize(folder: Path, options: SpeechOptions) -> None:
    """Synthesize in a temporary folder and rename it: other machines may do so at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as draft:
        corpus = Path(draft) / folder.name
        synthesize_corpus(corpus, train=options.spoken_train, test=options.spoken_test)
        try:
            corpus.rename(folder)
        except OSError:
            if not folder.exists():
                raise
