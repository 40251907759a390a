# SPDX-License-Identifier: Apache-2.0
"""`Images`: ResNet-20 and VGG-16, cross entropy, accuracy."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from oktopk.lab.tasks.base import Metric, Samples, Task, fingerprint
from oktopk.lab.tasks.example_random import random_bits
from oktopk.lab.tasks.images.data import augment, check_data, mean_and_deviation, read_dataset
from oktopk.lab.tasks.options import ImagesOptions

# ResNet-20 for small images (He et al. 2015, section 4.2).
#
# A convolution, then 3 stages of 3 blocks with 16, 32 and 64 channels, then a linear layer. Where
# a stage halves the image, the shortcut is a 1 x 1 convolution (option B of the paper).


BLOCKS = 3
"""Blocks of a stage: 3 * 3 blocks of 2 convolutions, and the first and last layer make 20."""


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias, and batch norm."""
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two convolutions, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, 3, stride)
        self.second = convolution(outputs, outputs, 3)
        is_same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.second(relu(self.first(x))) + self.shortcut(x))


class ResNet20(nn.Module):
    """Logits of the classes."""

    def __init__(self, channels: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem = convolution(channels, width, 3)
        blocks, inputs = [], width
        for stage in range(3):
            for index in range(BLOCKS):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Block(inputs, width * 2**stage, stride))
                inputs = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(relu(self.stem(images))).mean((2, 3)))


# VGG-16 with batch norm for images of 32 x 32 (Simonyan and Zisserman 2014).
#
# Thirteen convolutions in 5 stages, each of which halves the image, then one linear layer, as is
# usual for CIFAR-10.


STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Channels of a stage as a multiple of the first one's, and the number of its convolutions."""


class VGG16(nn.Module):
    """Logits of the classes."""

    def __init__(self, channels: int, classes: int, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for factor, number in STAGES:
            for _ in range(number):
                outputs = factor * width
                convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
                nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(convolution.bias)  # pyright: ignore[reportArgumentType] - it has one
                layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        # the mean is over one pixel for images of 32 x 32
        return self.head(self.features(images).mean((2, 3)))


# `Images`: normalised and augmented images, cross entropy, accuracy.


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
