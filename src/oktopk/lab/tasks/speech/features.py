# SPDX-License-Identifier: Apache-2.0
"""Spectrograms, computed once, and the batches that are made of them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BufferedRandom
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from oktopk.lab.tasks.speech.recordings import DataError, Utterance, encode, read_audio

# Spectrograms, computed once: magnitudes in one file that all processes map into memory.
#
# As in the original code: 20 ms windows (320 samples, symmetric Hamming) every 10 ms, centred,
# with mirrored ends (librosa's padding before 0.10), magnitudes, log(1 + x), normalised by
# utterance. Samples are in [-1, 1), so loud magnitudes reach tens, and gain moves them along the
# bend of the logarithm: it does not cancel in the normalisation.
#
# Augmentation happens on the magnitudes. Another tempo at the same pitch is an interpolation of
# them in time (what a phase vocoder does, and phases are not used here); gain is a factor.


WINDOW, HOP = 320, 160
BINS = WINDOW // 2 + 1
FORMAT = f"spectra 1: window {WINDOW} hop {HOP} symmetric hamming, mirrored, float32"

Progress = Callable[[int, int], object]  # done, of


@dataclass(frozen=True, slots=True)
class Spectra:
    """Magnitudes of all utterances of a manifest, one after the other. Read only."""

    frames: Tensor
    """Spectra in each utterance, int64."""

    starts: Tensor
    """The first row of each utterance in `rows`, int64."""

    rows: Tensor
    """(frames, 161) float32, mapped from the file: processes share the memory."""

    def magnitudes(self, i: int) -> Tensor:
        """(frames, 161) of utterance i, a view."""
        start = int(self.starts[i])
        return self.rows[start : start + int(self.frames[i])]


def spectrogram(samples: np.ndarray) -> Tensor:
    """Magnitudes (frames, 161) of 16 kHz samples: one spectrum per 10 ms, the first at 0."""
    transform = torch.stft(
        torch.from_numpy(samples),
        WINDOW,
        HOP,
        window=torch.hamming_window(WINDOW, periodic=False),
        center=True,
        pad_mode="reflect",
        return_complex=True,
    )
    return transform.abs().T.contiguous()


def features(spectra: Spectra, i: int, tempo: float = 1.0, gain_db: float = 0.0) -> Tensor:
    """(161, T) float32: log(1 + magnitude), mean 0 and deviation 1 over the utterance.

    At `tempo` 1.1 speech is a tenth faster, at the same pitch.
    """
    x = at_tempo(spectra.magnitudes(i), tempo)
    x = torch.log1p_(x * 10 ** (gain_db / 20))
    x.sub_(x.mean())
    # as torch.std, in a tenth of the time; `check` has refused silence, whose deviation is 0
    std = torch.linalg.vector_norm(x) / (x.numel() - 1) ** 0.5
    return x.div_(std.clamp_min(1e-6)).T


def at_tempo(rows: Tensor, tempo: float) -> Tensor:
    """Rows interpolated at every `tempo`-th position."""
    if tempo == 1.0:
        return rows
    position = torch.arange(max(1, round(len(rows) / tempo)), dtype=torch.float64) * tempo
    position.clamp_(max=len(rows) - 1)
    before = position.long()
    after = (before + 1).clamp_(max=len(rows) - 1)
    weight = (position - before).float().unsqueeze(1)
    return rows.index_select(0, before).lerp_(rows.index_select(0, after), weight)


def open_spectra(
    utterances: list[Utterance], cache: str | Path, progress: Progress | None = None
) -> Spectra:
    """Map the spectra of the utterances from the cache, and compute them first if they are missing.

    The file is named after a hash of the settings and of the paths, sizes and times of the
    recordings. It is renamed when complete, so several processes may compute it at the same time.
    """
    cache = Path(cache)
    path = cache / f"{_key(utterances)}.spectra"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        _build(utterances, path, progress)
    count = len(utterances)
    size = path.stat().st_size
    damaged = DataError([f"{path} is damaged: remove it, it will be made again"])
    if size < (8 + 4 * BINS) * count:
        raise damaged
    content = torch.from_file(str(path), size=size, dtype=torch.uint8)
    frames = content[: 8 * count].view(torch.int64).clone()
    # first each count by itself: a sum of huge counts may overflow to the expected one
    most = size // (4 * BINS)
    if not bool(((frames > 0) & (frames <= most)).all()) or (
        size != 8 * count + 4 * BINS * int(frames.sum())
    ):
        raise damaged
    rows = content[8 * count :].view(torch.float32).view(-1, BINS)
    return Spectra(frames, frames.cumsum(0) - frames, rows)


def _key(utterances: list[Utterance]) -> str:
    digest = hashlib.sha256(FORMAT.encode())
    for utterance in utterances:
        status = utterance.audio.stat()
        identity = (str(utterance.audio.resolve()), status.st_size, status.st_mtime_ns)
        digest.update(repr(identity).encode())
    return digest.hexdigest()[:32]


def _build(utterances: list[Utterance], path: Path, progress: Progress | None) -> None:
    """Write frame counts, then rows. Space is reserved for the counts, which are known last."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            _fill(utterances, cast(BufferedRandom, file), progress)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _fill(utterances: list[Utterance], file: BufferedRandom, progress: Progress | None) -> None:
    frames = np.zeros(len(utterances), np.int64)
    file.write(frames.tobytes())
    for i, utterance in enumerate(utterances):
        rows = spectrogram(read_audio(utterance.audio))
        frames[i] = len(rows)
        file.write(rows.numpy().tobytes())
        if progress:
            progress(i + 1, len(utterances))
    file.seek(0)
    file.write(frames.tobytes())
    file.flush()


# Which rank gets which utterances in which step, and the tensors of a batch.
#
# All random numbers are a function of (seed, epoch, utterance), so they do not change when a run
# is resumed, or when an utterance goes to another rank.


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
