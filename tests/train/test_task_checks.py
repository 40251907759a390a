# SPDX-License-Identifier: Apache-2.0
"""A task that returns something else than it should is told so in one line."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oktopk.errors import RunError
from oktopk.train.step import _backward
from oktopk.train.tasks import Metric
from oktopk.train.tasks.base import to_device
from oktopk.train.validate import check_evaluate

CPU = torch.device("cpu")


class Wrong:
    """A task whose methods return what it was made with."""

    metrics = (Metric("accuracy"), Metric("val_loss"))
    num_columns, num_test = 2, 5

    def __init__(self, returned) -> None:
        self.returned = returned

    def train_batch(self, indices, epoch):
        return torch.zeros(len(indices))

    def test_batch(self, indices):
        return torch.zeros(len(indices))

    def loss(self, model, batch):
        return self.returned

    def evaluate(self, model, batch):
        return self.returned


def test_an_array_in_a_batch_is_named():
    with pytest.raises(RunError, match="has a NumPy array: let train_batch and test_batch return"):
        to_device({"x": (torch.zeros(2), np.zeros(2))}, CPU)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ({"accuracy": 1.0}, "got a dict"),
        (torch.zeros(2, 1), r"got a tensor of shape \(2, 1\)"),
        (torch.zeros(2), r"got a tensor of shape \(2,\)"),
    ],
)
def test_what_evaluate_must_return_is_said_before_training(returned, named):
    text = rf"Wrong.evaluate .* 2 examples and 2 columns .*accuracy, val_loss\), {named}"
    with pytest.raises(RunError, match=text):
        check_evaluate(Wrong(returned), torch.nn.Identity(), CPU)


def test_a_check_of_evaluate_leaves_the_model_in_training_mode():
    model = torch.nn.Identity()
    check_evaluate(Wrong(torch.zeros(2, 2)), model, CPU)
    assert model.training


@pytest.mark.parametrize(("returned", "named"), [(torch.zeros(3), "shape"), (0.5, "a float")])
def test_a_loss_is_one_value(returned, named):
    exchange = SimpleNamespace(module=None, no_sync=nullcontext)
    run = SimpleNamespace(
        task=Wrong(returned), device=CPU, exchange=exchange, progress=SimpleNamespace(epoch=0)
    )
    seconds = {"data": 0.0, "forward": 0.0, "backward": 0.0}
    with pytest.raises(RunError, match=f"Wrong.loss must return a tensor with one value.*{named}"):
        _backward(run, [0], synced=True, parts=1, seconds=seconds)
