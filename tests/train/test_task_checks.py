# SPDX-License-Identifier: Apache-2.0
"""A task that returns something else than it should is told so in one line."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oktopk.errors import RunError
from oktopk.lab.tasks import Metric, option
from oktopk.lab.tasks.base import checked, checked_task, to_device
from oktopk.lab.train.config import make_config
from oktopk.lab.train.loop import _backward, finished, why_finished
from oktopk.lab.train.setup import Progress, Target
from oktopk.lab.train.validate import check_evaluate

CPU = torch.device("cpu")


class Wrong:
    """A task whose methods return what it was made with."""

    metrics = (Metric("accuracy"), Metric("val_loss"))
    num_columns, num_test = 2, 5

    def __init__(self, returned, **members) -> None:
        """`members` replace those of the class; a method returns its value."""
        self.returned, self.members = returned, members
        vars(self).update({name: v for name, v in members.items() if name.startswith("num_")})

    def train_batch(self, indices, epoch):
        return torch.zeros(len(indices))

    def test_batch(self, indices):
        return torch.zeros(len(indices))

    def loss(self, model, batch):
        return self.returned

    def evaluate(self, model, batch):
        return self.returned

    def summarize(self, rows):
        return self.members.get("summarize", {"accuracy": 0.5, "val_loss": 1})

    def samples(self, model, number):
        return self.members.get("samples", [{"said": "a", "heard": "b"}])


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


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"summarize": {"accuracy": 0.5}}, r"summarize\(\) must return .*: val_loss is missing"),
        ({"summarize": {"accuracy": torch.ones(1)}}, r"summarize\(\) must be a dict of numbers"),
        ({"summarize": 0.5}, r"summarize\(\) must be a dict of numbers .*, got a float"),
        ({"samples": ["text"]}, r"samples\(\) must be a list of dicts, with a text for each name"),
        ({"samples": [{"said": 1}]}, r"samples\(\) must be a list of dicts"),
        ({"samples": [{}]}, r"samples\(\) must be a list of dicts"),
        ({"samples": None}, r"samples\(\) must be a list of dicts.*, got None"),
    ],
)
def test_what_is_shown_after_a_validation_is_checked_before_training(members, named):
    task = Wrong(torch.zeros(2, 2), **members)
    with pytest.raises(RunError, match=rf"^Wrong\.{named}"):
        check_evaluate(task, torch.nn.Identity(), CPU, samples=True)


def test_what_is_right_passes_and_samples_are_for_one_rank():
    check_evaluate(Wrong(torch.zeros(2, 2)), torch.nn.Identity(), CPU, samples=True)
    check_evaluate(Wrong(torch.zeros(2, 2), samples=7), torch.nn.Identity(), CPU)


@pytest.mark.parametrize("number", [0, -1, 2.5, None, True, "8"])
def test_a_task_says_how_many_examples_it_has(number):
    assert checked_task(Wrong(None, num_train=np.int64(3), num_test=1))
    text = "Wrong.num_test must be a whole number of examples, at least 1, got "
    with pytest.raises(RunError, match=text):
        checked_task(Wrong(None, num_train=8, num_test=number))
    with pytest.raises(RunError, match=r"Wrong.num_train must be .* got None"):
        checked_task(Wrong(None))


@pytest.mark.parametrize(
    ("member", "value", "named"),
    [
        ("fingerprint()", 7, "must be a text, as oktopk.lab.tasks.fingerprint returns it, got 7"),
        ("build_model()", len, "must be a torch.nn.Module, got a builtin_function_or_method"),
    ],
)
def test_data_and_model_are_of_the_right_kind(member, value, named):
    with pytest.raises(RunError) as caught:
        checked(Wrong(None), member, value)
    assert str(caught.value) == f"Wrong.{member} {named}"


def test_an_option_needs_a_default_of_a_type_that_files_have():
    with pytest.raises(ValueError, match=r"default of an option must be text, .* got None"):
        option(None, "how many")


@pytest.mark.parametrize(
    ("settings", "progress", "why"),
    [
        ({"until": "loss<9"}, Progress(target_reached=True), "loss <= 9 was reached (--until)"),
        ({"max_steps": 4}, Progress(step=4), "4 steps were the limit (--max-steps)"),
        ({"max_minutes": 0.5}, Progress(seconds=30), "0.5 minutes of training were the limit (--"),
        ({"epochs": 3}, Progress(epoch=3), "all 3 epochs were trained (--epochs)"),
    ],
)
def test_a_run_without_steps_left_names_what_ended_it(settings, progress, why):
    target = Target(Metric("loss"), 9.0)
    run = SimpleNamespace(config=make_config(**settings), progress=progress, target=target)
    assert why_finished(run).startswith(why)
    assert finished(run) is ("epochs" not in settings)


def test_a_loss_without_a_gradient_is_told():
    with pytest.raises(RunError, match=r"Wrong.loss returns a tensor without a gradient: compute"):
        backward(torch.zeros(1))


@pytest.mark.parametrize(("returned", "named"), [(torch.zeros(3), "shape"), (0.5, "a float")])
def test_a_loss_is_one_value(returned, named):
    with pytest.raises(RunError, match=f"Wrong.loss must return a tensor with one value.*{named}"):
        backward(returned)


def backward(returned):
    exchange = SimpleNamespace(module=None, no_sync=nullcontext)
    run = SimpleNamespace(
        task=Wrong(returned), device=CPU, exchange=exchange, progress=SimpleNamespace(epoch=0)
    )
    seconds = {"data": 0.0, "forward": 0.0, "backward": 0.0}
    _backward(run, [0], synced=True, parts=1, seconds=seconds)
