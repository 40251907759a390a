# SPDX-License-Identifier: Apache-2.0
"""The settings of the speech task. The defaults are those of the original code for lstman4."""

from __future__ import annotations

from dataclasses import dataclass

from oktopk.train.option import check_options, option
from oktopk.train.tasks.base import TaskOptions

MOST_WEIGHTS = 2**31
"""Most weights of the LSTM layers: indices of gradient entries are 32-bit integers."""
DISK = (1, 10**6, "more than a disk holds")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechOptions(TaskOptions):
    """Corpus, augmentation, size of the model and decoding."""

    data: str = option(
        "", "folder with manifests (oktopk data); empty: a synthesized corpus", harmless=True
    )
    cache: str = option(
        "", "where spectrograms are cached; empty: beside the manifests", harmless=True
    )
    augment: bool = option(True, "vary tempo and gain of the training audio")
    spoken_train: int = option(948, "training utterances of a synthesized corpus", bounds=DISK)
    spoken_test: int = option(130, "test utterances of a synthesized corpus", bounds=DISK)
    hidden: int = option(
        800, "width of the LSTM layers", fixed=True, bounds=(1, 16_384, "wider than memory allows")
    )
    layers: int = option(5, "LSTM layers", fixed=True, bounds=(1, 128, "deeper than memory allows"))
    bidirectional: bool = option(
        False, "LSTMs in both directions, instead of a lookahead layer", fixed=True
    )
    channels: int = option(
        32, "channels of the convolutions", fixed=True, bounds=(1, 1024, "more than memory allows")
    )
    beam: int = option(
        0,
        "width of the beam search; 0: greedy decoding",
        bounds=(0, 10_000, "a beam that wide takes hours for each utterance"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        weights = 8 * self.hidden**2 * self.layers * (2 if self.bidirectional else 1)
        if weights > MOST_WEIGHTS:
            raise ValueError(
                f"hidden = {self.hidden} and layers = {self.layers} make about {weights:.1e} "
                f"weights, and at most {MOST_WEIGHTS:.1e} are possible: lower hidden or layers"
            )
