"""What `attach` refuses at once, by name, before a rank waits for another."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def refuse_misuse(
    model: object, timeout: float, clip_before: float | None, check_every: int
) -> None:
    """Raise TypeError for a model, ValueError for a number that cannot work."""
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach needs a DistributedDataParallel model, got {type(model).__name__}; Accelerate "
            "and Lightning wrap the model only when there is more than one process"
        )
    _refuse_gradients(model)
    _refuse_unordered(model)
    if not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout}")
    if clip_before is not None and not clip_before > 0:
        raise ValueError(f"clip_before must be more than 0, or None, got {clip_before}")
    if check_every < 0:
        raise ValueError(f"check_every must be 0 (never) or more steps, got {check_every}")


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


def is_on_cuda(model: nn.Module) -> bool:
    """Whether the gradients travel by NCCL."""
    return any(parameter.is_cuda for parameter in model.parameters())


def may_overlap(model: nn.Module) -> bool:
    """Whether buckets may be exchanged while backward goes on.

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
            "of the used parameters by NCCL while the exchange thread sends the gradients, in an "
            "order that differs between ranks, and the job may hang. If the same parameters are "
            "unused in every step, use DistributedDataParallel(..., static_graph=True); else let "
            "every parameter take part in the loss, for instance times 0"
        )
