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
