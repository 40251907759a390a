# SPDX-License-Identifier: Apache-2.0
"""The settings of the images task."""

from __future__ import annotations

from dataclasses import dataclass

from oktopk.train.option import check_options, option
from oktopk.train.tasks.base import TaskOptions

LEAST_SIZE = {"resnet20": 8, "vgg16": 32}
"""Least height and width of the images of a model, which halves them 2 or 5 times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesOptions(TaskOptions):
    """The images, the model and augmentation."""

    data: str = option(
        "",
        "folder or zip with train/CLASS/*.jpg|png and test/CLASS/..., or folder with train.zip and "
        "test.zip; empty: scikit-learn's digits",
        harmless=True,
    )
    cache: str = option("", "where decoded images are cached; empty: data/cache", harmless=True)
    size: int = option(
        0,
        "resize all images to this height and width; 0: as they are",
        fixed=True,
        bounds=(0, 1024, "larger than these models are for"),
    )
    model: str = option("resnet20", "the model", *LEAST_SIZE, fixed=True)
    width: int = option(
        0,
        "channels of the first stage; 0: 16 for resnet20, 64 for vgg16",
        fixed=True,
        bounds=(0, 1024, "more than memory allows"),
    )
    crop: int = option(
        0,
        "most pixels that a training image is shifted by at random, with zeros around; 0: off",
        bounds=(0, 256, "more than an image has"),
    )
    flip: bool = option(False, "mirror half of the training images at random")

    def __post_init__(self) -> None:
        check_options(self)
        if self.size:
            check_images(self, self.size, self.size, "size")


def check_images(options: ImagesOptions, height: int, width: int, what: str) -> None:
    """ValueError if images of this size are too small for the model or for `crop`."""
    least = LEAST_SIZE[options.model]
    if min(height, width) < least:
        others = [name for name, size in LEAST_SIZE.items() if size <= min(height, width)]
        choice = f"--model {others[0]} or " if others else ""
        raise ValueError(
            f"{what}: {options.model} needs images of at least {least} x {least}, and these are "
            f"{height} x {width}: use {choice}--size {least}"
        )
    if options.crop >= min(height, width):
        raise ValueError(
            f"{what}: crop = {options.crop} shifts images of {height} x {width} out of sight: "
            "lower it"
        )
