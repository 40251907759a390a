# SPDX-License-Identifier: Apache-2.0
"""`Text`: random crops of a text to train on, fixed ones to validate with."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oktopk.train.tasks.base import Metric, Samples, Task, fingerprint
from oktopk.train.tasks.example_random import random_bits
from oktopk.train.tasks.text.corpus import read_corpus
from oktopk.train.tasks.text.gpt import GPT, generate
from oktopk.train.tasks.text.options import TextOptions

PROMPT, CONTINUED = 32, 48
"""Most characters of a sample's prompt, and the number of characters after it."""


class Text(Task):
    """A GPT predicts the next character.

    An epoch has as many crops as fit the text, each at a random position.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("val_loss", "validation loss", best=0),  # nats per character
        Metric("accuracy", higher_is_better=True, best=1),
    )
    options_type = TextOptions
    unit = "crops"

    def __init__(self, options: TextOptions, seed: int) -> None:
        super().__init__(options, seed)
        self.corpus = read_corpus(options)
        self.num_train = len(self.corpus.train) // options.context
        self._num_fitting = (len(self.corpus.validation) - 1) // options.context
        """Crops that fit the validation text without overlap."""
        self.num_test = min(options.validation_crops, self._num_fitting)
        corpus = self.corpus
        self._fingerprint = fingerprint(corpus.characters, corpus.train, corpus.validation)

    @classmethod
    def check(cls, options: TextOptions) -> None:
        read_corpus(options)

    def fingerprint(self) -> str:
        return self._fingerprint

    def describe(self) -> str:
        train, validation = len(self.corpus.train), len(self.corpus.validation)
        return (
            f"{train:,} + {validation:,} characters, {len(self.corpus.characters)} different, "
            f"{self.num_train:,} + {self.num_test:,} crops"
        )

    def build_model(self) -> nn.Module:
        own = self.options
        return GPT(
            own.vocabulary or len(self.corpus.characters),
            layers=own.layers,
            heads=own.heads,
            width=own.width,
            context=own.context,
            dropout=own.dropout,
        )

    def train_batch(self, indices: list[int], epoch: int) -> tuple[Tensor, Tensor]:
        # a modulus this small leaves no bias that could be noticed in 64 bits
        positions = len(self.corpus.train) - self.options.context
        starts = random_bits(self.seed, epoch, indices) % np.uint64(positions)
        return self._crops(self.corpus.train, starts)

    def test_batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        # spread over the whole text
        crops = np.asarray(indices) * self._num_fitting // self.num_test
        return self._crops(self.corpus.validation, crops * self.options.context)

    def _crops(self, text: Tensor, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """The characters from each start, and for each of them the one after it."""
        context = self.options.context
        begins = torch.from_numpy(starts.astype(np.int64))
        rows = text[begins.unsqueeze(1) + torch.arange(context + 1)].long()
        return rows[:, :-1], rows[:, 1:]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        logits = model(inputs)
        losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
        right = (logits.argmax(-1) == targets).float().mean(1)
        return torch.stack([losses, right], 1)

    def uses_weight_decay(self, name: str, parameter: nn.Parameter) -> bool:
        return parameter.dim() > 1

    def samples(self, model: nn.Module, number: int) -> Samples:
        """Beginnings of validation crops, continued by the model."""
        chosen = min(number, self.num_test)
        crops = [i * self.num_test // chosen for i in range(chosen)]
        context, corpus = self.options.context, self.corpus
        device = next(model.parameters()).device
        prompts = self.test_batch(crops)[0][:, : min(PROMPT, context)].to(device)
        whole = generate(model, prompts, CONTINUED, context, len(corpus.characters)).cpu()
        return [
            {
                "prompt": printable(corpus.decode(row[: prompts.shape[1]])),
                "continued": printable(corpus.decode(row[prompts.shape[1] :])),
            }
            for row in whole
        ]


def printable(text: str) -> str:
    r"""The text in one line: a line break is shown as \n."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
