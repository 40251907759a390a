# SPDX-License-Identifier: Apache-2.0
"""Language modelling: a GPT predicts the next character of a text."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from oktopk.lab.tasks.base import Metric, Samples, Task, fingerprint
from oktopk.lab.tasks.example_random import random_bits
from oktopk.lab.tasks.options import TextOptions
from oktopk.utils.files import FileError, file_error, read_text

# The text of the task as numbers, one for each different character.


MOST_BYTES = 2**28
"""Largest text in bytes. Every rank has it in memory."""
TENTH = 10
"""Every tenth file, or the last tenth of a text, is for validation."""
NUM_CODE_POINTS = 0x110000
STDLIB = "the standard library"
OTHER = "\ufffd"
"""Stands for every character of the standard library's source that is not ASCII."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text to train on and one to validate with, as indices into `characters`."""

    characters: str
    """All different characters in both texts, in the order of their code points."""

    train: Tensor
    validation: Tensor

    def decode(self, tokens: Tensor) -> str:
        """The text of some tokens."""
        return "".join(self.characters[i] for i in tokens.tolist())


def read_corpus(options: TextOptions) -> Corpus:
    """Read the text and check that it suits the options. FileError says in one line if not."""
    where = options.data or STDLIB
    texts = _read_texts(options.data)
    train, validation = _split(texts)
    needed = options.context + 1  # a crop, and the character after it
    if len(texts) < TENTH and len(validation) < needed:
        found, least = len(train) + len(validation), TENTH * options.context + 1
        raise _too_short(where, found, least, options.context)
    if min(len(train), len(validation)) < needed:
        part = "the files for validation" if len(validation) < needed else "the files for training"
        found = min(len(train), len(validation))
        raise _too_short(f"{where}: {part}", found, needed, options.context)
    corpus = _encode(train, validation)
    if options.vocabulary and options.vocabulary < len(corpus.characters):
        raise file_error(
            where,
            f"has {len(corpus.characters)} different characters, and vocabulary is "
            f"{options.vocabulary}",
            advice="raise vocabulary, or set it to 0",
        )
    return corpus


def _too_short(where: str, found: int, least: int, context: int) -> FileError:
    return file_error(
        where,
        f"has {found} characters, and a context of {context} needs at least {least}",
        advice="use a longer text or a smaller context",
    )


def _read_texts(data: str) -> list[str]:
    """The text of one file, or of every file in a folder."""
    path = Path(data)
    if not data:
        source = Path(sysconfig.get_paths()["stdlib"])
        return _read_files(sorted(source.glob("*.py")), _read_ascii)
    if not path.exists():
        raise file_error(data, "there is no such file", advice="give a text file to --data")
    if not path.is_dir():
        return [read_text(path, MOST_BYTES)]
    files = sorted(path.rglob("*.txt"))
    if not files:
        raise file_error(data, "has no *.txt in it", advice="give a text file, or a folder of them")
    return _read_files(files, lambda file: read_text(file, MOST_BYTES))


def _read_files(files: list[Path], read: Callable[[Path], str]) -> list[str]:
    texts, total = [], 0
    for file in files:
        texts.append(read(file))
        total += len(texts[-1])
        if total > MOST_BYTES:
            raise file_error(file.parent, f"has more than {MOST_BYTES} characters")
    return texts


def _read_ascii(file: Path) -> str:
    """A file of the standard library. Some of its files have single characters of many scripts."""
    text = file.read_bytes().decode("utf-8", "replace")
    return text if text.isascii() else "".join(c if c.isascii() else OTHER for c in text)


def _split(texts: list[str]) -> tuple[str, str]:
    """The text to train on, and the one to validate with.

    Of many files every tenth is for validation. Few files are one text, and its last tenth is.
    """
    if len(texts) >= TENTH:
        others = (text for i, text in enumerate(texts) if i % TENTH)
        return "".join(others), "".join(texts[::TENTH])
    whole = "".join(texts)
    cut = len(whole) * (TENTH - 1) // TENTH
    return whole[:cut], whole[cut:]


def _encode(train: str, validation: str) -> Corpus:
    points = [np.frombuffer(text.encode("utf-32-le"), np.uint32) for text in (train, validation)]
    present = np.zeros(NUM_CODE_POINTS, bool)
    for some in points:
        present[some] = True
    known = np.flatnonzero(present)
    kind = np.uint8 if len(known) <= 256 else np.int32
    numbers = np.zeros(NUM_CODE_POINTS, kind)
    numbers[known] = np.arange(len(known), dtype=kind)
    tokens = [torch.from_numpy(numbers[some]) for some in points]
    return Corpus("".join(map(chr, known)), *tokens)


# A GPT: a decoder-only transformer with pre-norm blocks, learned positions and no biases.
#
# Structure and initialisation are those of GPT-2 (Radford et al. 2019) without its biases, as in
# nanoGPT. The embedding of the tokens is also the last layer.


INITIAL_DEVIATION = 0.02
"""Standard deviation of initial weights, as in GPT-2."""


class CausalSelfAttention(nn.Module):
    """Every position attends to itself and to those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # (3, batch, heads, length, width of a head)
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Two layers with GELU, four times as wide in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expansion = nn.Linear(width, 4 * width, bias=False)
        self.projection = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(functional.gelu(self.expansion(x)))


class Block(nn.Module):
    """Attention, then the MLP. Both read a normalised x and add to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Logits of the next token at every position."""

    def __init__(
        self,
        vocabulary: int,
        *,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        context: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue  # a norm, whose weights are 1
            # 2 * layers projections add to x, and its variance should not grow with their number
            depth = 2 * layers if "projection" in name else 1
            nn.init.normal_(parameter, std=INITIAL_DEVIATION / depth**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) tokens to (batch, length, vocabulary) logits."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def generate(model: nn.Module, tokens: Tensor, number: int, context: int, known: int) -> Tensor:
    """Continue each row of tokens by `number` sampled tokens below `known`. The seed is fixed."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        logits = model(tokens[:, -context:])[:, -1, :known]
        chances = logits.float().softmax(-1).cpu()
        chosen = torch.multinomial(chances, 1, generator=generator)
        tokens = torch.cat([tokens, chosen.to(tokens.device)], 1)
    return tokens


# `Text`: random crops of a text to train on, fixed ones to validate with.


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
