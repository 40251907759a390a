# SPDX-License-Identifier: Apache-2.0
"""What `local_steps` needs of a model and an optimizer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from oktopk.adapters.local_steps.step_hooks import is_hooked
from oktopk.adapters.parameters import ParameterLayout
from oktopk.adapters.policy import Policy
from oktopk.adapters.validation import check_optimizer
from oktopk.engine.buckets import MAX_INDEXABLE
from oktopk.optim.flat_views import is_dtensor
from oktopk.optim.residual_scaling import innermost_optimizer
from oktopk.settings import Settings


def parameters_of(model: nn.Module, policy: Policy, settings: Settings) -> ParameterLayout:
    """The layout of the model's parameters; TypeError or ValueError if it cannot be exchanged."""
    layout = ParameterLayout(dict(model.named_parameters()), policy)
    for name, parameter in layout.parameters.items():
        _check_parameter(name, parameter)
    if not layout.parameters:
        raise ValueError("no parameter of this model requires gradients: nothing is trained")
    numel = sum(parameter.numel() for parameter in layout.parameters.values())
    if numel > MAX_INDEXABLE and settings.method != "dense":
        raise ValueError(
            f"the model has {numel} trainable entries, and no more than {MAX_INDEXABLE} can be "
            "selected together, as indices are int32: use method='dense', or freeze some parameters"
        )
    return layout


def _check_parameter(name: str, parameter: Tensor) -> None:
    if is_dtensor(parameter):
        raise TypeError(
            f"parameter {name!r} is a DTensor, which is spread over ranks: local_steps needs whole "
            "parameters, as a plain module or DistributedDataParallel has; for a model that FSDP2 "
            "shards inside a site, exchange gradients between sites with oktopk.attach_fsdp"
        )
    if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
        raise TypeError(
            f"parameter {name!r} is {parameter.dtype}: local_steps exchanges fp16, bf16, fp32 and "
            "float64 parameters; freeze it, or keep it in one of these"
        )


def optimizer_of(optimizer: Any, parameters: ParameterLayout) -> Optimizer:
    """The optimizer itself, without schedulers and wrappers; it must train the model."""
    inner = innermost_optimizer(optimizer)
    if not hasattr(inner, "register_step_post_hook"):
        raise TypeError(f"expected an optimizer or a scheduler, got {type(optimizer).__name__}")
    advice = "make the optimizer from model.parameters(), after the model was moved to its device"
    check_optimizer(inner, parameters.parameters.values(), advice)
    if is_hooked(inner):
        raise ValueError("this optimizer has local steps already: close() their handle first")
    return inner
