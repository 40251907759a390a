# SPDX-License-Identifier: Apache-2.0
"""Images and labels in memory, of files or of scikit-learn's digits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from oktopk.train.tasks.images.decode import first_size, open_images
from oktopk.train.tasks.images.folders import find_images
from oktopk.train.tasks.images.options import ImagesOptions, check_images
from oktopk.utils.extras import require

DIGITS = "scikit-learn's digits"
DIGIT_SIZE = 8
NEEDED_FOR_DIGITS = ("oktopk train --task images without --data", "sklearn")
CHUNK = 4096
"""Images of which a sum is taken at once."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """The images to train on, then those to test with."""

    classes: list[str]
    images: Tensor
    """(N, channels, height, width) uint8."""

    labels: Tensor
    """(N,) int64."""

    num_train: int


def check_data(options: ImagesOptions) -> None:
    """Raise if images or classes are missing. It decodes one image only."""
    if options.data:
        train, _ = find_images(options.data)
        check_images(options, *first_size(train, options.size), options.data)
    else:
        require(*NEEDED_FOR_DIGITS)
        side = options.size or DIGIT_SIZE
        check_images(options, side, side, DIGITS)


def read_dataset(options: ImagesOptions) -> Dataset:
    """The images of `options.data`, decoded if they are not in the cache, or the digits."""
    if not options.data:
        return read_digits(options)
    splits = find_images(options.data)
    images = torch.from_numpy(open_images(splits, options.cache, options.size))
    height, width = images.shape[2:]
    check_images(options, height, width, options.data)
    labels = torch.tensor([label for split in splits for label in split.labels])
    train = splits[0]
    return Dataset(train.classes, images, labels, len(train.files))


def read_digits(options: ImagesOptions) -> Dataset:
    """1,797 grey images of 8 x 8. Every third is for testing."""
    require(*NEEDED_FOR_DIGITS)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32) * (240 / 16)  # digits have 17 shades
    images = images.view(-1, 1, DIGIT_SIZE, DIGIT_SIZE)
    if options.size:
        images = interpolate(images, (options.size, options.size), mode="bilinear").round_()
    is_test = np.arange(len(labels)) % 3 == 0
    order = torch.from_numpy(np.argsort(is_test, kind="stable"))
    classes = [str(digit) for digit in range(10)]
    return Dataset(
        classes, images.to(torch.uint8)[order], torch.tensor(labels)[order], int((~is_test).sum())
    )


def mean_and_deviation(images: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel, float32. From sums of integers, which are the same bits everywhere."""
    total = torch.zeros(2, images.shape[1], dtype=torch.int64)
    for part in images.split(CHUNK):
        values = part.to(torch.int32)
        total[0] += values.sum((0, 2, 3))
        total[1] += values.square_().sum((0, 2, 3))
    mean, square = total.double() / (images.numel() // images.shape[1])
    deviation = (square - mean.square()).clamp_min(0).sqrt()
    # a channel that is the same everywhere becomes 0
    return mean.float(), torch.where(deviation > 0, deviation, 1.0).float()
