# SPDX-License-Identifier: Apache-2.0
"""ResNet-20 for small images (He et al. 2015, section 4.2).

A convolution, then 3 stages of 3 blocks with 16, 32 and 64 channels, then a linear layer. Where a
stage halves the image, the shortcut is a 1 x 1 convolution (option B of the paper).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu

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
