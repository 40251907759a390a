# SPDX-License-Identifier: Apache-2.0
"""Tensor shapes of well-known models, without their code."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Shapes = list[tuple[int, ...]]


def lstman4() -> Shapes:
    """Return the shapes of lstman4 at full size: 27,569,568 gradients, 40 tensors."""
    from oktopk.train.tasks.speech.lstman4 import Lstman4

    with torch.device("meta"):
        return [tuple(p.shape) for p in Lstman4(hidden=800, layers=5, channels=32).parameters()]


def vgg16() -> Shapes:
    """Return those of VGG-16, batch norm, 32 x 32 images: 14,728,266 gradients, 54 tensors."""
    shapes, channels = [], 3
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            shapes += [(width, channels, 3, 3), (width,), (width,), (width,)]
            channels = width
    return [*shapes, (10, 512), (10,)]


def bert_base() -> Shapes:
    """Return those of BERT-base with its masked-word head: 133,547,324 gradients, 207 tensors."""
    width, inner, words = 768, 3072, 30522
    norm: Shapes = [(width,), (width,)]
    square: Shapes = [(width, width), (width,)]
    layer = [*square * 4, *norm, (inner, width), (inner,), (width, inner), (width,), *norm]
    embeddings: Shapes = [(words, width), (512, width), (2, width), *norm]
    head: Shapes = [*square, *norm, (words, width), (words,), (2, width), (2,)]
    return [*embeddings, *layer * 12, *square, *head]


MODELS: dict[str, Callable[[], Shapes]] = {
    "lstman4": lstman4,
    "vgg16": vgg16,
    "bert-base": bert_base,
}


def shapes_of(model: str) -> Shapes:
    """Return the shapes of a named model, or of a near-square matrix and a bias for a number."""
    if model in MODELS:
        return MODELS[model]()
    try:
        numel = int(float(model))
    except (ValueError, OverflowError):
        numel = 0
    if numel < 1:
        raise ValueError(f"--model is one of {', '.join(MODELS)} or a number, got {model!r}")
    rows = math.isqrt(numel)
    matrix, rest = (rows, numel // rows), numel - rows * (numel // rows)
    return [matrix, (rest,)] if rest else [matrix]
