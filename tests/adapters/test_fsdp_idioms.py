# SPDX-License-Identifier: Apache-2.0
"""Training scripts as people write them for FSDP2: each works as dense HSDP does, or is refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import oktopk
from sites import SPARSE, Net, Site, assert_same_bits, batch, mesh_of, shard, whole

DENSITY_ONE = {"density": 1.0, "warmup_steps": 0}
STEPS = 4


@dataclass(frozen=True)
class Idiom:
    """How a training script differs from the plainest one."""

    sharding: dict = field(default_factory=dict)
    """Arguments of `fully_shard`."""

    before: str = ""
    """What is done to the model before it is sharded."""

    after: str = ""
    """What is done to the model after it was sharded."""

    accumulate: str = ""
    """How the gradients of three batches are accumulated."""

    clip: float | None = None
    optimizer: type = torch.optim.SGD
    tolerance: float = 2e-6


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

IDIOMS = {
    "accumulation_without_sync": Idiom(accumulate="set_requires_gradient_sync"),
    "accumulation_without_all_reduce": Idiom(accumulate="set_requires_all_reduce"),
    "accumulation_with_sync": Idiom(accumulate="every backward"),
    "mixed_precision": Idiom(sharding={"mp_policy": MIXED}),
    "mixed_precision_with_a_copied_gradient": Idiom(sharding={"mp_policy": LOW}, tolerance=5e-3),
    "several_parameter_groups": Idiom(optimizer=torch.optim.AdamW),
    "keep_after_forward": Idiom(sharding={"reshard_after_forward": False}),
    "keep_after_backward": Idiom(after="set_reshard_after_backward"),
    "activation_checkpointing": Idiom(before="checkpoint"),
    "reentrant_checkpointing_of_inner_modules": Idiom(before="reentrant checkpoint"),
    "cpu_offload": Idiom(sharding={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "frozen_parameters": Idiom(before="freeze"),
    "clipping": Idiom(clip=0.1),
    "compiled_blocks": Idiom(before="compile"),
    "shards_of_columns": Idiom(after="columns"),
    "modules_in_a_list": Idiom(after="list"),
    "divide_factor": Idiom(after="set_gradient_divide_factor"),
}


def prepared(idiom: Idiom) -> torch.nn.Module:
    torch.manual_seed(0)
    model = Net()
    for i, block in enumerate(model.blocks):
        if idiom.before == "checkpoint":
            model.blocks[i] = checkpoint_wrapper(block)
        elif idiom.before == "reentrant checkpoint":
            model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.REENTRANT)
        elif idiom.before == "compile":
            block.compile(backend="aot_eager")
        elif idiom.before == "freeze" and i == 0:
            block.requires_grad_(False)
    if idiom.before == "freeze":
        model.head.bias.requires_grad_(False)
    return model


def sharded(idiom: Idiom, mesh) -> torch.nn.Module:
    more = dict(idiom.sharding)
    if idiom.after == "columns":
        even = lambda p: Shard(1) if p.shape[-1] % 4 == 0 and p.ndim > 1 else Shard(0)  # noqa: E731
        more["shard_placement_fn"] = even
    model = prepared(idiom)
    if idiom.after == "list":
        fully_shard([model.first, model.head], mesh=mesh)
    model = shard(model, mesh, **more)
    if idiom.after == "set_reshard_after_backward":
        model.set_reshard_after_backward(False)
    if idiom.after == "set_gradient_divide_factor":  # what all ranks have in their local batches
        for module in (*model.blocks, model):
            module.set_gradient_divide_factor(2)
    return model


def optimizer_of(idiom: Idiom, model) -> torch.optim.Optimizer:
    if idiom.optimizer is torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}]
    return idiom.optimizer(groups, lr=1e-3)


def backwards(idiom: Idiom, model, step: int) -> None:
    """One backward, or three whose gradients are accumulated."""
    parts = 3 if idiom.accumulate else 1
    for part in range(parts):
        is_last = part == parts - 1
        if idiom.accumulate.startswith("set_"):
            getattr(model, idiom.accumulate)(is_last)
        x, y = batch(dist.get_rank(), parts * step + part)
        (cross_entropy(model(x), y) / parts).backward()


def train(group, name: str, attached: dict | None) -> tuple:
    idiom, mesh = IDIOMS[name], mesh_of(2)
    if attached is None:
        site = Site(sharded(idiom, mesh), None)
    else:
        site = Site(sharded(idiom, mesh["shard"]), None)
        how = attached | {"on_step": site.stats.append, "check_every": 2}
        site.handle = oktopk.attach_fsdp(site.model, mesh["replicate"], **how)
    site.optimizer = optimizer_of(idiom, site.model)
    for step in range(STEPS):
        backwards(idiom, site.model, step)
        if idiom.clip is not None:
            torch.nn.utils.clip_grad_norm_(site.model.parameters(), idiom.clip)
        site.optimizer.step()
        site.optimizer.zero_grad()
    for module in site.model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    steps = len(site.stats)
    if site.handle is not None:
        site.handle.close()
    return whole(site.model), steps


@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom_at_density_one_is_dense_hsdp(worlds, name):
    reference = worlds.run(4, train, name, None)
    ours = worlds.run(4, train, name, DENSITY_ONE)
    assert_same_bits([weights for weights, _ in ours])
    each_backward = IDIOMS[name].accumulate == "every backward"
    assert all(steps == STEPS * (3 if each_backward else 1) for _, steps in ours)
    for parameter, value in ours[0][0].items():
        tolerance = IDIOMS[name].tolerance
        expected = reference[0][0][parameter]
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", IDIOMS)
def test_the_replicas_of_an_idiom_stay_the_same_at_two_percent(worlds, name):
    ours = worlds.run(4, train, name, SPARSE | {"warmup_steps": 1})
    assert_same_bits([weights for weights, _ in ours])


# What cannot work is refused, with a sentence.


def refused(group, name: str) -> str:
    """The error of something that cannot work."""
    torch.manual_seed(0)
    mesh = mesh_of(2)
    try:
        REFUSED[name][0](mesh)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def attach(model, mesh, **more):
    return oktopk.attach_fsdp(model, mesh["replicate"], **SPARSE | {"timeout": 10.0} | more)


def on_a_mesh_of_two(mesh) -> None:
    attach(shard(Net(), mesh), mesh)


def a_plain_module(mesh) -> None:
    attach(Net(), mesh)


def by_attach(mesh) -> None:
    oktopk.attach(shard(Net(), mesh["shard"]))


def twice(mesh) -> None:
    model = shard(Net(), mesh["shard"])
    attach(model, mesh)
    attach(model, mesh)


def the_shard_group(mesh) -> None:
    oktopk.attach_fsdp(shard(Net(), mesh["shard"]), mesh["shard"])


def no_group(mesh) -> None:
    oktopk.attach_fsdp(shard(Net(), mesh["shard"]), mesh)


def ignored_parameters(mesh) -> None:
    model = Net()
    fully_shard(model, mesh=mesh["shard"], ignored_params={model.head.weight})
    attach(model, mesh)


def nothing_to_train(mesh) -> None:
    attach(shard(Net().requires_grad_(False), mesh["shard"]), mesh)


def one_step(model) -> None:
    x, y = batch(dist.get_rank(), 0)
    cross_entropy(model(x), y).backward()


def frozen_later(mesh) -> None:
    model = shard(Net(), mesh["shard"])
    attach(model, mesh)
    model.blocks[0].inner.weight.requires_grad_(False)
    one_step(model)


def no_gradient(mesh) -> None:
    model = Net()
    model.blocks[0].spare = torch.nn.Linear(3, 3)
    attach(shard(model, mesh["shard"]), mesh)
    one_step(model)


def an_optimizer_in_backward(mesh) -> None:
    model = shard(Net(), mesh["shard"])
    attach(model, mesh)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    one_step(model)


def other_weights(mesh) -> None:
    torch.manual_seed(mesh["replicate"].get_local_rank())
    model = shard(Net(), mesh["shard"])
    attach(model, mesh)
    one_step(model)


def other_settings(mesh) -> None:
    density = 0.1 if dist.get_rank() == 3 else 0.2
    attach(shard(Net(), mesh["shard"]), mesh, density=density)


def reentrant_checkpointing(mesh) -> None:
    model = shard(Net(), mesh["shard"])
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.REENTRANT)
    attach(model, mesh)
    one_step(model)


class Recomputed(torch.nn.Linear):
    """A layer that reentrant checkpointing computes anew in backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class CalledTwice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = torch.nn.Linear(20, 20), Recomputed(20, 20)

    def forward(self, x):
        return self.inner(self.inner(self.first(x)))


def reduced_twice(mesh) -> None:
    model = CalledTwice()
    fully_shard(model.inner, mesh=mesh["shard"])
    attach(fully_shard(model, mesh=mesh["shard"]), mesh)
    one_step(model)


def a_part(mesh) -> None:
    model = shard(Net(), mesh["shard"])
    attach(model.blocks[0], mesh)
    one_step(model)


def closed(mesh) -> None:
    model = shard(Net(), mesh["shard"])
    attach(model, mesh).close()
    attach(model, mesh).close()
    one_step(model)


def an_early_optimizer(mesh) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    attach(shard(model, mesh["shard"]), mesh, optimizer=optimizer)


def a_compiled_model(mesh) -> None:
    attach(torch.compile(shard(Net(), mesh["shard"]), backend="eager"), mesh)


def other_weights_after_loading(mesh) -> None:
    model = shard(Net(), mesh["shard"])
    handle = attach(model, mesh)
    one_step(model)
    handle.load_state_dict(handle.state_dict())
    with torch.no_grad():
        model.head.bias += mesh["replicate"].get_local_rank()
    one_step(model)


def several_meshes(mesh) -> None:
    model = Net()
    fully_shard(model.blocks[0], mesh=mesh["replicate"])
    fully_shard(model, mesh=mesh["shard"])
    attach(model, mesh)


def tensor_parallelism(mesh) -> None:
    model = Net()
    plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
    parallelize_module(model.blocks[0], mesh["shard"], plan)
    fully_shard(model, mesh=mesh["replicate"])
    oktopk.attach_fsdp(model, mesh["shard"])


def not_all_ranks(mesh) -> None:
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("rest", "replicate"))
    attach(shard(Net(), mesh["shard"]), alone)


REFUSED = {
    "a mesh of two dimensions": (on_a_mesh_of_two, 'fully_shard(model, mesh=mesh["shard"])'),
    "a plain module": (a_plain_module, "that fully_shard was called with, got Net"),
    "attach": (by_attach, "or oktopk.attach_fsdp(model, ...)"),
    "attached twice": (twice, "close() its handle first"),
    "the shard group": (the_shard_group, "exactly this rank in common"),
    "a mesh as the group": (no_group, "pass the one whose ranks exchange"),
    "ignored parameters": (ignored_parameters, "'head.weight' is not sharded by FSDP"),
    "nothing to train": (nothing_to_train, "nothing is trained"),
    "frozen later": (frozen_later, "was changed after attach_fsdp"),
    "a parameter without gradient": (no_gradient, "set_reduce_scatter_unused_params(True)"),
    "an optimizer in backward": (an_optimizer_in_backward, "register_post_accumulate_grad_hook"),
    "other weights": (other_weights, "give all of them the same seed"),
    "other settings": (other_settings, "density"),
    "reentrant checkpointing": (reentrant_checkpointing, "needs use_reentrant=False there"),
    "reduced twice": (reduced_twice, "'inner' twice in one backward"),
    "a part of a model": (a_part, "Call it with the outermost one"),
    "closed": (closed, "was closed: call attach_fsdp again"),
    "an early optimizer": (an_early_optimizer, "make it after fully_shard"),
    "a compiled model": (a_compiled_model, "call it before torch.compile"),
    "other weights after loading": (other_weights_after_loading, "give all of them the same seed"),
    "automatic density": (lambda mesh: attach(Net(), mesh, density="auto"), "no density='auto'"),
    "several meshes": (several_meshes, "attach_fsdp needs one mesh for all of them"),
    "tensor parallelism": (tensor_parallelism, "parameters that only FSDP shards"),
    "not all ranks": (not_all_ranks, "and the job has 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(worlds, name):
    for text in worlds.run(4, refused, name):
        assert REFUSED[name][1] in text, text
