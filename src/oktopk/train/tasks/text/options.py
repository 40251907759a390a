# SPDX-License-Identifier: Apache-2.0
"""The settings of the text task. The defaults are nanoGPT's for CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from oktopk.train.option import check_options, option
from oktopk.train.tasks.base import TaskOptions

MOST_WEIGHTS = 2**31
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
