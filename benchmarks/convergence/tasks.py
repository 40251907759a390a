"""Small tasks without a download: digits, and characters of the Python standard library.

A seed determines the initial weights and the order of the data; both are the same for all settings.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model, its data and how to train it. The hyperparameters suit dense training."""

    network: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    """(seeded generator, how many) -> one step's inputs and targets, of all ranks together."""

    test: Callable[[], Batch]
    metric: Callable[[Tensor, Tensor], float]
    measure: str
    higher_is_better: bool
    steps: int
    warmup_steps: int
    size: int
    optimizers: dict[str, Callable[..., Optimizer]]


def network_of_digits() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def digits() -> Task:
    """A small CNN reads scikit-learn's digits: 1,198 images to train on, 599 to test."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:599], order[599:]

    def batch(generator: torch.Generator, size: int) -> Batch:
        chosen = train[torch.randint(len(train), (size,), generator=generator)]
        return images[chosen], labels[chosen]

    return Task(
        network=network_of_digits,
        batch=batch,
        test=lambda: (images[test], labels[test]),
        metric=lambda scores, truth: (scores.argmax(1) == truth).float().mean().item(),
        measure="accuracy",
        higher_is_better=True,
        steps=160,  # later nothing is left to learn
        warmup_steps=10,
        size=64,
        optimizers={
            "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
            "adamw": lambda p: AdamW(p, lr=3e-3, weight_decay=0.01),
        },
    )


class Reader(nn.Module):
    """A GRU that predicts the next character."""

    def __init__(self, characters: int = 128, hidden: int = 192) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, 32)
        self.recurrent = nn.GRU(32, hidden, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(x))[0]).transpose(1, 2)


LENGTH = 48  # characters a step reads of each place


def chars() -> Task:
    """The next character in the standard library's source; every tenth file is for testing."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_bytes().decode("utf-8", "replace") for path in files]

    def codes(some: list[str]) -> Tensor:
        return torch.tensor([min(ord(c), 127) for text in some for c in text])

    test = codes(texts[::10])
    train = codes([text for i, text in enumerate(texts) if i % 10])

    def cut(source: Tensor, size: int, generator: torch.Generator) -> Batch:
        places = torch.randint(len(source) - LENGTH - 1, (size, 1), generator=generator)
        rows = source[places + torch.arange(LENGTH + 1)]
        return rows[:, :-1], rows[:, 1:]

    return Task(
        network=Reader,
        batch=lambda generator, size: cut(train, size, generator),
        test=lambda: cut(test, 256, torch.Generator().manual_seed(7)),
        metric=lambda scores, truth: cross_entropy(scores, truth).item(),
        measure="nats per character",
        higher_is_better=False,
        steps=800,
        warmup_steps=20,
        size=32,
        optimizers={
            "sgd": lambda p: SGD(p, lr=1.0, momentum=0.9),
            "adamw": lambda p: AdamW(p, lr=1e-2, weight_decay=0.01),
        },
    )


def rate_schedule(optimizer: Optimizer, steps: int) -> OneCycleLR:
    """A rise over a twentieth of the run to the optimizer's rate, then a cosine to about 0."""
    most = optimizer.param_groups[0]["lr"]
    return OneCycleLR(
        optimizer, max_lr=most, total_steps=steps, pct_start=0.05, cycle_momentum=False
    )


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "chars": chars}
