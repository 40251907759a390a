# SPDX-License-Identifier: Apache-2.0
"""A task of the trainer in one process, for experiments that take their steps themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.lab.tasks.registry import task_type
from oktopk.lab.train.config_files import load
from oktopk.lab.train.setup import learning_rate, make_optimizer


class Experiment:
    """Model, optimizer and batches of a task, with the settings of its default config.

    Every step has one batch for each of `ranks`, as a run with that many workers would have.
    """

    def __init__(
        self, task: str, ranks: int, seed: int = 0, steps: int = 0, **changed: Any
    ) -> None:
        config = load(task=task)
        self.steps = steps or config.max_steps or 500
        self.config = replace(config, seed=seed, lr_steps=self.steps, **changed)
        kind = task_type(task)
        kind.prepare(self.config.options)
        self.task = kind(self.config.options, seed)
        torch.manual_seed(seed)
        self.model = self.task.build_model()
        self.optimizer = make_optimizer(self.config, self.task, self.model)
        self.ranks = ranks

    def batches(self) -> Iterator[list[Any]]:
        """The batches of all ranks, for every step; sets the learning rate of the step."""
        step = epoch = 0
        while True:
            for indices in self.task.steps(epoch, self.config.batch, self.ranks):
                if step == self.steps:
                    return
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate(self.config, epoch, step, self.steps)
                yield [self.task.train_batch(rank, epoch) for rank in indices]
                step += 1
            epoch += 1

    def backward(self, batch: Any) -> None:
        """The gradients of one batch."""
        self.optimizer.zero_grad()
        self.task.loss(self.model, batch).backward()

    def gradients(self, batches: list[Any]) -> Tensor:
        """The flat gradient of every batch, a row each."""
        rows = []
        for batch in batches:
            self.backward(batch)
            grads = [p.grad for p in self.parameters]
            rows.append(torch.cat([grad.flatten() for grad in grads if grad is not None]))
        return torch.stack(rows)

    def apply_(self, flat: Tensor) -> None:
        """One step of the optimizer with a flat gradient."""
        parts = flat.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        self.optimizer.step()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def metric(self) -> float:
        """The first metric of the task on all its test examples."""
        self.model.eval()
        with torch.inference_mode():
            batch = self.task.test_batch(list(range(self.task.num_test)))
            rows = self.task.evaluate(self.model, batch).double()
        self.model.train()
        return self.task.summarize(rows)[self.task.metrics[0].name]
