# SPDX-License-Identifier: Apache-2.0
"""`Images`: normalised and augmented images, cross entropy, accuracy."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oktopk.train.tasks.base import Metric, Samples, Task, fingerprint
from oktopk.train.tasks.example_random import random_bits
from oktopk.train.tasks.images.augment import augment
from oktopk.train.tasks.images.dataset import check_data, mean_and_deviation, read_dataset
from oktopk.train.tasks.images.options import ImagesOptions
from oktopk.train.tasks.images.resnet import ResNet20
from oktopk.train.tasks.images.vgg import VGG16

MODELS = {"resnet20": (ResNet20, 16), "vgg16": (VGG16, 64)}
"""Each model with the channels of its first stage."""


class Images(Task):
    """A convolutional network tells the class of an image."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", higher_is_better=True, best=1),
        Metric("val_loss", "validation loss", best=0),
    )
    options_type = ImagesOptions
    unit = "images"

    def __init__(self, options: ImagesOptions, seed: int) -> None:
        super().__init__(options, seed)
        self.dataset = read_dataset(options)
        self.num_train = self.dataset.num_train
        self.num_test = len(self.dataset.labels) - self.num_train
        mean, deviation = mean_and_deviation(self.dataset.images[: self.num_train])
        self._mean, self._deviation = mean.view(-1, 1, 1), deviation.view(-1, 1, 1)
        self._fingerprint = fingerprint(
            "\n".join(self.dataset.classes),
            str(self.num_train),
            self.dataset.images,
            self.dataset.labels,
        )

    @classmethod
    def check(cls, options: ImagesOptions) -> None:
        check_data(options)

    @classmethod
    def prepare(cls, options: ImagesOptions) -> None:
        read_dataset(options)  # decodes the images into the cache

    def fingerprint(self) -> str:
        return self._fingerprint

    def describe(self) -> str:
        height, width = self.dataset.images.shape[2:]
        number = len(self.dataset.classes)
        return f"{super().describe()} of {height} x {width} in {number} classes"

    def build_model(self) -> nn.Module:
        build, width = MODELS[self.options.model]
        channels, number = self.dataset.images.shape[1], len(self.dataset.classes)
        return build(channels, number, self.options.width or width)

    def train_batch(self, indices: list[int], epoch: int) -> tuple[Tensor, Tensor]:
        images, labels = self._normalised(indices)
        if self.options.crop or self.options.flip:
            bits = random_bits(self.seed, epoch, indices)
            images = augment(images, bits, self.options.crop, self.options.flip)
        return images, labels

    def test_batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self._normalised([self.num_train + index for index in indices])

    def _normalised(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        images = self.dataset.images[rows].float()
        return images.sub_(self._mean).div_(self._deviation), self.dataset.labels[rows]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        logits = model(images)
        right = (logits.argmax(1) == labels).float()
        return torch.stack([right, cross_entropy(logits, labels, reduction="none")], 1)

    def samples(self, model: nn.Module, number: int) -> Samples:
        """The classes of some test images, and those that the model took them for."""
        chosen = min(number, self.num_test)
        images, labels = self.test_batch([i * self.num_test // chosen for i in range(chosen)])
        device = next(model.parameters()).device
        found = model(images.to(device)).argmax(1).tolist()
        classes = self.dataset.classes
        return [
            {"class": classes[label], "predicted": classes[guess]}
            for label, guess in zip(labels.tolist(), found, strict=True)
        ]
