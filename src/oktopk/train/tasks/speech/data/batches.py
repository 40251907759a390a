# SPDX-License-Identifier: Apache-2.0
"""Which rank gets which utterances in which step, and the tensors of a batch.

All random numbers are a function of (seed, epoch, utterance), so they do not change when a run is
resumed, or when an utterance goes to another rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oktopk.train.tasks.speech.data.features import BINS, Spectra, features
from oktopk.train.tasks.speech.data.labels import encode
from oktopk.train.tasks.speech.data.manifest import Utterance

TEMPO = (0.85, 1.15)
GAIN_DB = (-6.0, 8.0)
ORDER, AUGMENT = 0, 1  # separate streams of random numbers


@dataclass(frozen=True, slots=True)
class Batch:
    """Utterances padded to the longest of them, longest first."""

    inputs: Tensor
    """(N, 1, 161, T) float32, zero beyond an utterance's length."""

    lengths: Tensor
    """(N,) int64: frames of each, descending."""

    targets: Tensor
    """(sum of target_lengths,) int64: the labels of all, one after the other."""

    target_lengths: Tensor
    """(N,) int64."""

    texts: list[str]
    ids: list[int]

    def to(self, device: torch.device) -> Batch:
        """The batch with its tensors on a device."""
        names = ("inputs", "lengths", "targets", "target_lengths")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def plan(
    count: int, batch: int, ranks: int, epoch: int, seed: int, shuffle: bool = True
) -> list[list[list[int]]]:
    """The utterances of every step and rank in an epoch: `plan(...)[step][rank]`.

    Utterances are numbered by duration. A step takes `batch * ranks` neighbours and distributes
    them in turn, so all ranks have about the same work and none waits for the longest recording of
    another; the order of the steps is seeded by the epoch. The step depends on `batch * ranks`
    alone: 4 ranks of 4 do what 1 rank of 16 does. What is left over is drawn anew each epoch, so
    that nothing is left out for good. Without `shuffle` the steps stay in order, shortest first.
    """
    steps = count // (batch * ranks)
    if steps == 0:
        raise ValueError(
            f"{count} utterances do not fill one step of {ranks} ranks with {batch} each: "
            "use a smaller batch or fewer workers"
        )
    chance = np.random.default_rng([ORDER, seed, epoch])
    kept = np.sort(chance.permutation(count)[: steps * ranks * batch])
    dealt = kept.reshape(steps, batch, ranks).transpose(0, 2, 1)
    return (dealt[chance.permutation(steps)] if shuffle else dealt).tolist()


def collate(
    spectra: Spectra,
    utterances: list[Utterance],
    indices: list[int],
    epoch: int,
    seed: int,
    augment: bool,
) -> Batch:
    """The tensors of some utterances. In training each has a random tempo and gain."""
    changes = {i: augmentation(seed, epoch, i) if augment else (1.0, 0.0) for i in indices}
    items = [(i, features(spectra, i, *changes[i])) for i in indices]
    items.sort(key=lambda item: (-item[1].shape[1], item[0]))
    lengths = torch.tensor([x.shape[1] for _, x in items])
    inputs = torch.zeros(len(items), 1, BINS, int(lengths[0]))
    for row, (_, x) in zip(inputs, items, strict=True):
        row[0, :, : x.shape[1]] = x
    ids = [i for i, _ in items]
    texts = [utterances[i].text for i in ids]
    labels = [encode(text) for text in texts]
    return Batch(
        inputs,
        lengths,
        torch.tensor([label for text in labels for label in text]),
        torch.tensor([len(text) for text in labels]),
        texts,
        ids,
    )


def augmentation(seed: int, epoch: int, utterance: int) -> tuple[float, float]:
    """Tempo and gain (dB) of an utterance in an epoch."""
    chance = np.random.default_rng([AUGMENT, seed, epoch, utterance])
    return chance.uniform(*TEMPO), chance.uniform(*GAIN_DB)
