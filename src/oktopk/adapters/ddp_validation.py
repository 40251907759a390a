# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of `attach`, before a rank waits for another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.ddp_driver import SETTLED
from oktopk.adapters.ddp_handle import attached_to
from oktopk.adapters.parameters import check_devices, is_on_cuda
from oktopk.exchange.layout import check_indexable
from oktopk.settings import Settings
from oktopk.utils.arguments import number, written


def check_model(model: object, chosen: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for a model that cannot work, naming what is in the way.

    `chosen` are the arguments that `attach` was called with, for the line to write instead.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach needs a DistributedDataParallel model, got {type(model).__name__}; "
            + _advice_for(model, chosen)
        )
    _refuse_wrapping(model)
    _refuse_hooks(model)
    check_devices(list(model._module_parameters), _backends(model), "attach")
    _refuse_gradients(model)
    _refuse_unordered(model)


TRAINER_LINE = (
    "the Trainer of Hugging Face wraps it in train(), and gives its callbacks the bare one: after "
    "Trainer(...), write trainer.add_callback(OktopkCallback(trainer{more})), from "
    "oktopk.integrations.huggingface import OktopkCallback; with Accelerate, pass what "
    "accelerator.prepare returned"
)
LIGHTNING_LINE = (
    "Lightning wraps it in fit(): write Trainer(callbacks=[OktopkCallback({options})]), from "
    "oktopk.integrations.lightning import OktopkCallback"
)
FABRIC_LINE = (
    "Fabric keeps it inside: write attach_fabric(fabric, model, optimizer{more}), from "
    "oktopk.integrations.lightning import attach_fabric"
)
ADVICE = {
    "transformers": TRAINER_LINE,
    "peft": TRAINER_LINE,
    "lightning.pytorch": LIGHTNING_LINE,
    "pytorch_lightning": LIGHTNING_LINE,
    "lightning.fabric": FABRIC_LINE,
    "lightning_fabric": FABRIC_LINE,
}
"""By the package of a class: what to write where a framework wraps the model itself, with the
options that the user has chosen."""


def _advice_for(model: object, chosen: Mapping[str, Any]) -> str:
    """What to write instead, by the framework that a class of the model comes from."""
    more = written({n: v for n, v in chosen.items() if n not in ("optimizer", "scaler")})
    for kind in type(model).__mro__:
        for package, line in ADVICE.items():
            if kind.__module__ == package or kind.__module__.startswith(f"{package}."):
                return line.format(more=more, options=more.removeprefix(", "))
    return (
        f"write attach(DistributedDataParallel(model){written(chosen)}), or "
        "oktopk.attach_fsdp(model, ...) for what fully_shard was called with; where a framework "
        "wraps it (Hugging Face Trainer, Accelerate, Lightning, Ray Train, Ignite), "
        "oktopk.integrations has the line"
    )


def clip_norm(clip_before: Any) -> float | None:
    """A norm to clip to; None is not to clip."""
    if clip_before is None:
        return None
    norm = number("clip_before", clip_before, "more than 0, or None")
    if not norm > 0:
        raise ValueError(f"clip_before must be more than 0, or None, got {clip_before}")
    return norm


def check_size(model: DistributedDataParallel, settings: Settings) -> None:
    """Raise ValueError where more entries are selected together than int32 can index."""
    if settings.method == "dense":  # it has no indices
        return
    trained = [p for p in model._module_parameters if p.requires_grad]
    numels = [p.numel() for p in trained]
    if settings.scope == "bucket":
        # DDP closes a bucket at so many bytes, and never cuts a parameter; but the first steps are
        # exchanged in its first buckets, which may be one for everything
        cap = model.bucket_bytes_cap // min((p.element_size() for p in trained), default=1)
        largest = cap + max(numels, default=0)
        numels = [min(sum(numels), largest) if settings.warmup_steps >= SETTLED else sum(numels)]
    check_indexable(numels, settings.scope)


def _refuse_wrapping(model: DistributedDataParallel) -> None:
    """Some ways to make a DDP model leave no place for a hook."""
    if model._delay_all_reduce_all_params:
        raise TypeError(
            "this model delays the all-reduce of all its parameters "
            "(delay_all_reduce_named_params), so DDP calls no hook: wrap it without that"
        )
    if model._use_python_reducer:
        raise TypeError(
            "this model was made with torch._dynamo.config.optimize_ddp='python_reducer', which "
            "has no buckets: leave optimize_ddp as it is by default"
        )
    if model.mixed_precision is not None:
        raise TypeError(
            "this model has DDP's own mixed precision (mixed_precision=...), which needs the hook "
            "for itself: use torch.autocast, or parameters in 16 bits, instead"
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in model._module_parameters):
        raise TypeError(
            "an optimizer runs in the backward of this model (_apply_optimizer_in_backward), which "
            "needs DDP's hook for itself: call optimizer.step() after backward instead"
        )


def _refuse_hooks(model: DistributedDataParallel) -> None:
    """DDP takes one communication hook per model; ours may be used again once it is free."""
    state = attached_to(model)
    if state is not None:
        if not state.handle.closed:
            raise ValueError("this model is attached already: close() its handle first")
        return
    hook = model._get_ddp_logging_data().get("comm_hook")
    if hook:
        raise ValueError(
            f"this model has the communication hook {hook!r} already, and DDP takes one: wrap it "
            "anew (DistributedDataParallel(model.module)) and attach to that"
        )


def _backends(model: DistributedDataParallel) -> str:
    """`cpu:gloo,cuda:nccl`, say."""
    return dist.get_backend_config(model.process_group)


def _refuse_gradients(model: DistributedDataParallel) -> None:
    """Gradients must be dense and real. DDP would hand them over as something else."""
    ignored = model.parameters_to_ignore
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and parameter.is_complex() and name not in ignored:
            raise TypeError(
                f"parameter {name!r} is {parameter.dtype}: gradients must be real; keep it as real "
                "numbers and use torch.view_as_complex in forward, or train without attach"
            )
    for name, module in model.module.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        weight = f"{name}.weight".lstrip(".")
        if sparse and module.weight.requires_grad and weight not in ignored:
            raise TypeError(
                f"parameter {weight!r} has sparse gradients: use {type(module).__name__}(..., "
                "sparse=False), attach sends only the largest entries anyway"
            )


def may_overlap(model: nn.Module) -> bool:
    """Whether buckets may be exchanged while backward continues.

    NCCL asks that all ranks run the operations of several communicators in one order
    (docs/cuda.md). SyncBatchNorm has operations of its own in backward: then ours must wait for the
    last bucket, which comes after all of them.
    """
    syncs = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return not (syncs and is_on_cuda(model))


def _refuse_unordered(model: DistributedDataParallel) -> None:
    """With NCCL, DDP may not send anything of its own after it has handed over the last bucket."""
    if model.find_unused_parameters and not model.static_graph and is_on_cuda(model):
        raise ValueError(
            "find_unused_parameters=True does not work with attach on CUDA: DDP then sends a map "
            "of the used parameters by NCCL while the communication thread sends the gradients, in "
            "an order that differs between ranks, and the job may hang. If the same parameters are "
            "unused in every step, use DistributedDataParallel(..., static_graph=True); else let "
            "every parameter take part in the loss, for instance times 0. Hugging Face's Trainer "
            "asks for it by default: pass TrainingArguments(ddp_find_unused_parameters=False)"
        )
