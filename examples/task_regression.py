# SPDX-License-Identifier: Apache-2.0
"""A task of one's own for `oktopk train`: a small network learns a function of ten variables.

    oktopk train --task examples/task_regression.py --noise 0.5

The function is Friedman's first (1991); five of the variables have nothing to do with it.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import mse_loss

from oktopk.lab.tasks import Metric, Task, TaskOptions, fingerprint, option

NUM_TRAIN, NUM_TEST, VARIABLES = 4096, 512, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RegressionOptions(TaskOptions):
    """Each option is a flag of `oktopk train`. Its type is that of its default value."""

    noise: float = option(
        1.0, "deviation of the noise on what is learned", bounds=(0, 100, "all would be noise")
    )
    # another width makes another model, so a run cannot be resumed with it
    width: int = option(256, "width of the layers", fixed=True, bounds=(1, 65_536, "too wide"))


class Regression(Task):
    # the first metric is the one that reports show first
    metrics = (Metric("mse", "mean squared error"), Metric("mae", "mean absolute error"))
    options_type = RegressionOptions
    defaults = {  # noqa: RUF012 - values for the flags of `oktopk train`
        "workers": 2,
        "epochs": 20,
        "batch": 64,
        "optimizer": "adamw",
        "lr": 0.003,
        "lr_final": 0.05,
        "lr_decay": 1.0,
        "validate_batch": 128,
    }
    num_train, num_test = NUM_TRAIN, NUM_TEST

    def __init__(self, options: RegressionOptions, seed: int) -> None:
        """Read the data. This is called on every rank, and all must have the same."""
        super().__init__(options, seed)
        generator = torch.Generator().manual_seed(0)  # the data is the same for every seed
        self.x = torch.rand(NUM_TRAIN + NUM_TEST, VARIABLES, generator=generator)
        a, b, c, d, e = self.x[:, :5].unbind(1)
        self.y = 10 * torch.sin(torch.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e
        noise = torch.randn(NUM_TRAIN, generator=generator)
        self.y[:NUM_TRAIN] += options.noise * noise

    def fingerprint(self) -> str:
        return fingerprint(self.x, self.y)

    def build_model(self) -> nn.Module:
        width = self.options.width
        layers = nn.Linear(VARIABLES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        return nn.Sequential(*layers, nn.Linear(width, 1), nn.Flatten(0))

    def train_batch(self, indices: list[int], epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[indices], self.y[indices]

    def test_batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.train_batch([NUM_TRAIN + index for index in indices], 0)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        error = model(batch[0]) - batch[1]
        return torch.stack([error**2, error.abs()], 1)  # the trainer takes the means
