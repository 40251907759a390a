# SPDX-License-Identifier: Apache-2.0
"""The learning rate of a step in closed form, so that a checkpoint need not hold it."""

from __future__ import annotations

import math

from oktopk.train.config import Config


def learning_rate(config: Config, epoch: int, step: int, total: int) -> float:
    """lr / decay^epoch, times a linear rise over the first steps, times a cosine to the end.

    The cosine ends after `lr_steps` or `total` steps; from there on its value is `lr_final`.
    """
    rise = min(1.0, (step + 1) / config.lr_warmup) if config.lr_warmup else 1.0
    end = config.lr_steps or total
    along = 0.5 * (1 + math.cos(math.pi * min(step, end) / end))
    fall = config.lr_final + (1 - config.lr_final) * along
    return config.lr / config.lr_decay**epoch * rise * fall
