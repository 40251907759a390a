# SPDX-License-Identifier: Apache-2.0
"""VGG-16 with batch norm for images of 32 x 32 (Simonyan and Zisserman 2014).

Thirteen convolutions in 5 stages, each of which halves the image, then one linear layer, as is
usual for CIFAR-10.
"""

from __future__ import annotations

from torch import Tensor, nn

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
