# SPDX-License-Identifier: Apache-2.0
"""The options of the tasks. They import without the packages that training needs."""

from __future__ import annotations

from dataclasses import dataclass

from oktopk.lab.tasks.base import TaskOptions, check_options, option

# The settings of the speech task. The defaults are those of the original code for lstman4.


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


# The settings of the text task. The defaults are nanoGPT's for CPUs.


"""Most weights of a model: indices of gradient entries are 32-bit integers."""
MEMORY = "more than memory allows"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions(TaskOptions):
    """The text and the size of the model."""

    data: str = option(
        "",
        "a UTF-8 text file, or a folder of *.txt; empty: the source of Python's standard library",
        harmless=True,
    )
    layers: int = option(4, "transformer blocks", fixed=True, bounds=(1, 256, MEMORY))
    heads: int = option(4, "attention heads of a block", fixed=True, bounds=(1, 256, MEMORY))
    width: int = option(128, "width of the embedding", fixed=True, bounds=(1, 32_768, MEMORY))
    context: int = option(
        64, "characters that the model sees at once", fixed=True, bounds=(1, 65_536, MEMORY)
    )
    dropout: float = option(
        0.0, "probability of dropout", bounds=(0.0, 0.99, "nothing would be left")
    )
    vocabulary: int = option(
        0,
        "rows of the embedding; 0: one for each character of the text",
        fixed=True,
        bounds=(0, 10**7, MEMORY),
    )
    validation_crops: int = option(
        200, "crops of the validation text to validate with", bounds=(1, 10**6, "it takes hours")
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.width % self.heads:
            raise ValueError(
                f"width = {self.width} cannot be divided by heads = {self.heads}: make it a "
                "multiple of heads"
            )
        weights = 12 * self.layers * self.width**2 + (self.vocabulary + self.context) * self.width
        if weights > MOST_WEIGHTS:
            raise ValueError(
                f"layers = {self.layers}, width = {self.width} and vocabulary = {self.vocabulary} "
                f"make about {weights:.1e} weights, and at most {MOST_WEIGHTS:.1e} are possible: "
                "lower one of them"
            )


# The settings of the images task.


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
