# SPDX-License-Identifier: Apache-2.0
"""FSDP2's shards: where they lie, and how gradients and weights of them are exchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.driver import GradientDriver, OnStep
from oktopk.adapters.link import ShardedRanks
from oktopk.adapters.parameters import ParameterLayout, Policy, time_limit
from oktopk.comm.communicator import Comm, Traffic
from oktopk.comm.consistency import check_consistency
from oktopk.comm.torch_transport import as_process_group
from oktopk.errors import ReplicaError
from oktopk.exchange.layout import Layout, ShardGroup
from oktopk.exchange.saved_state import clean_name
from oktopk.optim.residual_scaling import ResidualScaling
from oktopk.optim.staleness import local_shard
from oktopk.settings import Settings
from oktopk.sparse import acc_dtype

# FSDP's parameter groups: which parameters it reduces together, and where they lie in the result.
#
# `fully_shard` makes one group of the parameters of a module that no inner FSDP module has. In
# backward it reduce-scatters their gradients as one flat vector and calls the all-reduce hook with
# this rank's part of it, in which every parameter is padded to equal shares. FSDP has no public
# names for this; all that is read of its internals is read here.


Hook = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class ShardedModule:
    """The parameters that one FSDP module reduces together."""

    name: str
    module: FSDPModule
    group: Any
    """FSDP's own record, an `FSDPParamGroup`."""

    parameters: dict[str, Any]
    """By name, the `FSDPParam` of those that require gradients, in FSDP's order."""

    @property
    def numel(self) -> int:
        """Entries of the flat vector that the hook gets, with padding."""
        return sum(padded_numel(parameter) for parameter in self.parameters.values())

    @property
    def all_reduces(self) -> bool:
        """What `set_requires_all_reduce` said last."""
        return self.group.all_reduce_grads

    @property
    def divides_by_hand(self) -> bool:
        """Whether `set_gradient_divide_factor` was called: FSDP then divides by that alone."""
        return self.group.gradient_divide_factor is not None

    @property
    def device(self) -> torch.device:
        """Where gradients are computed; with CPU offload the parameters are elsewhere."""
        return self.group.device

    def hook(self, hook: Hook | None) -> None:
        """Let FSDP call this with the reduced gradient; None is nothing."""
        self.group._all_reduce_hook = hook


def refuse_backward(flat: Tensor) -> None:
    """The hook that `close` leaves: without it every replica would train on its own, unnoticed."""
    raise RuntimeError(
        "the handle of this FSDP model was closed: call attach_fsdp again, or "
        "model.set_all_reduce_hook(None) to train every replica on its own"
    )


def has_foreign_hook(group: Any) -> bool:
    """Whether an FSDP parameter group has a hook that `attach_fsdp` must not replace."""
    return group._all_reduce_hook not in (None, refuse_backward)


def padded_numel(parameter: Any) -> int:
    """Entries of a parameter in the flat vector of every rank."""
    return parameter.padded_sharded_param_size.numel()


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
    """The FSDP modules of a model that have parameters to train, in an order of their names.

    The parameters must be sharded, as they are between a backward and the next forward.
    """
    names = {id(p): clean_name(name) for name, p in model.named_parameters()}
    found, seen = [], set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in param_groups(module):
            if id(group) in seen:  # modules of one list, fully_shard([a, b]), share their groups
                continue
            seen.add(id(group))
            parameters = {
                names[id(each.sharded_param)]: each
                for each in group.fsdp_params
                if each.sharded_param.requires_grad
            }
            if parameters:
                found.append(ShardedModule(clean_name(name), module, group, parameters))
    return found


def is_in_backward(module: ShardedModule) -> bool:
    """Whether FSDP's own callback at the end of backward has still to run."""
    return module.module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def param_groups(module: FSDPModule) -> list[Any]:
    """FSDP's records of the parameters that it reduces together."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    only = state._fsdp_param_group  # of older versions of torch
    return [] if only is None else [only]


def is_root(model: Any) -> bool | None:
    """Whether no other FSDP module contains this one; None before the first forward."""
    return model._get_fsdp_state()._is_root


def reshard(model: nn.Module) -> None:
    """Let the model hold its shards: after a forward, FSDP leaves the root's parameters whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard_ranks(sharded: ShardedModule) -> list[int]:
    """The ranks of the job that have the shards of one replica, this one among them."""
    return dist.get_process_group_ranks(sharded.group.mesh_info.shard_process_group)


# `ShardLayout`: this rank's shards of the parameters, and where FSDP's flat vectors have them.


class ShardLayout(ParameterLayout):
    """One bucket for each FSDP module. Which parameters travel dense is decided by whole tensors.

    A parameter takes as many entries on every rank: where its rows cannot be divided evenly, those
    at its end are padding, whose gradient is zero. Nothing of it is ever selected.
    """

    def __init__(self, model: nn.Module, modules: list[ShardedModule], policy: Policy) -> None:
        self._sharded: dict[str, Any] = {}
        for module in modules:
            self._sharded |= module.parameters
        super().__init__(dict(model.named_parameters()), policy)
        self._model = model
        self.modules = modules
        self.layout: Layout = [list(module.parameters) for module in modules]

    @property
    def device(self) -> torch.device:
        """Where gradients are computed; with CPU offload the parameters are elsewhere."""
        return self.modules[0].device

    @property
    def is_inside_another(self) -> bool:
        """Whether the model is a part of another FSDP model. It is known after a forward."""
        return is_root(self._model) is False

    def stored(self) -> dict[str, Tensor]:
        """This rank's shards, by name."""
        return {name: self.shard(name) for name in self.parameters}

    def marks(self) -> dict[str, tuple[int, int]]:
        marks = {}
        for name in self.parameters:
            whole = self._sharded[name].sharded_param
            shard = (
                whole._local_tensor
            )  # a write to a DTensor is not counted there, nor the reverse
            marks[name] = (whole._version + shard._version, shard.data_ptr())
        return marks

    def shard(self, name: str) -> Tensor:
        """This rank's shard of a parameter, without padding."""
        return local_shard(self._sharded[name].sharded_param.detach())

    def zeros(self, name: str) -> Tensor:
        """A residual of zero, in the shape of this rank's shard."""
        shard = self.shard(name)
        return torch.zeros(shard.shape, dtype=acc_dtype(shard), device=self.device)

    def numel(self, name: str) -> int:
        return padded_numel(self._sharded[name])

    def views(self, flat: Tensor, names: list[str]) -> dict[str, Tensor]:
        """The parts of a flat bucket in the shapes of this rank's shards, without padding."""
        return {
            name: part[: self.shard(name).numel()].view(self.shard(name).shape)
            for name, part in self.parts(flat, names).items()
        }


# `ShardDriver`: exchanges this rank's shards of the gradients with the other replicas.
#
# FSDP calls a hook with every flat vector that it has reduced inside the site. The hook only notes
# it: a step may be applied only when no rank had a NaN, and the k largest entries are those of the
# whole model. The exchange of all of them runs at the end of backward, before `backward()`
# returns: so clipping and the optimizer see averages over all replicas, as with torch's own HSDP.


@dataclass(slots=True)
class Reduced:
    """What a backward has handed over so far."""

    flats: dict[int, Tensor] = field(default_factory=dict)
    """By number of the FSDP module: its reduced gradient, which `.grad` shows or is a copy of."""

    before: dict[str, Tensor] = field(default_factory=dict)
    """By parameter: the gradient that was there before this backward."""


class ShardDriver(GradientDriver[ShardLayout]):
    """The steps of an FSDP model on this rank."""

    line_to_load = "handle.load_checkpoint(folder)"

    def __init__(
        self,
        settings: Settings,
        comm: Comm,
        parameters: ShardLayout,
        scaling: ResidualScaling,
        check_every: int,
        on_step: OnStep | None,
        shards: ShardGroup,
        *,
        verbose: bool,
    ) -> None:
        super().__init__(
            settings, comm, parameters, scaling, check_every, on_step, verbose, shards=shards
        )
        self.shard_comm = shards.comm
        self.reduce_scattered = Traffic()
        """What FSDP's reduce-scatters of the gradients had this rank send, by their formula."""

        self._reduced = Reduced()
        self._partial: dict[int, Tensor] = {}
        """By number of the FSDP module: sums of backwards that do not all-reduce."""

        self.set_layout(parameters.layout, {})

    def copied_residuals(self) -> dict[str, Tensor]:
        """A copy of this rank's residuals by name, zero before the first sparse step."""
        views, layout = self.residuals, self.parameters
        return {
            name: views[name].clone() if name in views else layout.zeros(name)
            for name in layout.parameters
        }

    def take(self, number: int, flat: Tensor) -> None:
        """Note the reduced gradient of an FSDP module. FSDP makes `.grad` of it afterwards."""
        module = self.parameters.modules[number]
        self._check(module, flat)
        self._count_reduce_scatter(flat)
        if module.divides_by_hand:  # then HSDP sums over replicas, and the exchange averages
            flat *= self.comm.size
        if not module.all_reduces:
            self._accumulate(number, flat)
            return
        if number in self._reduced.flats:
            raise ValueError(
                f"step {self.engine.step}: FSDP has reduced the gradients of module "
                f"{module.name!r} twice in one backward, as with a module that is called twice and "
                "has checkpoint(..., use_reentrant=True) inside: attach_fsdp needs "
                "use_reentrant=False there"
            )
        if number in self._partial:
            flat += self._partial.pop(number)
        self._reduced.flats[number] = flat
        for name, parameter in module.parameters.items():
            if parameter.sharded_param.grad is not None:  # let FSDP make a new one
                self._reduced.before[name] = local_shard(parameter.sharded_param.grad)
                parameter.sharded_param.grad = None

    def exchange(self) -> None:
        """End a backward: exchange what FSDP has reduced, and let `.grad` be the averages."""
        reduced, self._reduced = self._reduced, Reduced()
        if is_in_backward(self.parameters.modules[0]):
            raise ValueError(
                "a backward has ended inside another one, as with activation checkpointing by "
                "checkpoint(..., use_reentrant=True) around an FSDP module: attach_fsdp needs "
                "use_reentrant=False there"
            )
        if not reduced.flats:  # a backward without all-reduce
            return
        self._check_complete(reduced)
        flats = [reduced.flats[number] for number in range(len(self.parameters.modules))]
        if not self.is_checked:
            self._check_first(flats[0])
        step = self.begin(flats[0])
        try:
            for number, flat in enumerate(flats):
                step.add_bucket(number, flat)
            stats = self.engine.finish(step)
        except BaseException:
            step.discard()
            raise
        self._deliver(reduced)
        self.report(stats)

    def forget(self) -> None:
        """Forget what backwards have handed over since the last exchange: the last one raised, and
        gradients that were accumulated before it are incomplete with it."""
        self._reduced, self._partial = Reduced(), {}

    def _check_first(self, like: Tensor) -> None:
        """Compare what only the first step shows, on both axes, and the weights."""
        if self.parameters.is_inside_another:
            raise ValueError(
                "attach_fsdp was called with a part of a model that fully_shard was called with as "
                "a whole: the parameters outside of that part would not be exchanged. Call it with "
                "the outermost one"
            )
        self.check_consistency(like, check_every=self.check_every)
        values = {"step": self.engine.step, "shares of k": self.engine.shares}
        check_consistency(self.shard_comm, like.device, values)
        self._check_replicas(self.engine.step)

    def _check_replicas(self, step: int) -> None:
        try:
            super()._check_replicas(step)
        except ReplicaError as error:
            raise ReplicaError(
                f"{error}. FSDP does not copy weights between replicas: give all of them the same "
                "seed, or load the same checkpoint"
            ) from None

    def _accumulate(self, number: int, flat: Tensor) -> None:
        """Add to the sum of backwards without all-reduce, as HSDP does; `.grad` becomes zero."""
        before = self._partial.get(number)
        self._partial[number] = flat.clone() if before is None else before.add_(flat)
        flat.zero_()

    def _deliver(self, reduced: Reduced) -> None:
        """Let `.grad` show the averages where it is a copy, and add what was there before."""
        for number, flat in reduced.flats.items():
            module = self.parameters.modules[number]
            views = self.parameters.views(flat, list(module.parameters))
            for name, average in views.items():
                grad = local_shard(module.parameters[name].sharded_param.grad)
                if grad.data_ptr() != average.data_ptr():  # of another dtype, or offloaded
                    grad.copy_(average)
                if name in reduced.before:
                    grad += reduced.before[name]

    def _count_reduce_scatter(self, flat: Tensor) -> None:
        peers = self.shard_comm.size - 1
        sent = peers * flat.nbytes
        self.reduce_scattered += Traffic(
            payload_sent=sent,
            payload_received=sent,
            messages_sent=peers,
            messages_received=peers,
        )

    def _check(self, module: ShardedModule, flat: Tensor) -> None:
        """Raise where FSDP's flat vector does not have exactly the parameters that it had."""
        where = f"step {self.engine.step}: FSDP module {module.name!r}"
        trained = [each for each in module.group.fsdp_params if each.sharded_param.requires_grad]
        if trained != list(module.parameters.values()):
            raise ValueError(
                f"{where}: requires_grad of its parameters was changed after attach_fsdp; close() "
                "the handle and call attach_fsdp again"
            )
        if flat.numel() != module.numel:
            raise ValueError(
                f"{where}: only {flat.numel()} of the {module.numel} entries of "
                f"{list(module.parameters)} have a gradient: some of these parameters took no part "
                "in the loss; call model.set_reduce_scatter_unused_params(True), or freeze them "
                "before attach_fsdp"
            )
        for name, each in module.parameters.items():
            if getattr(each.sharded_param, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"{where}: parameter {name!r} has a hook that runs when its gradient is "
                    "accumulated (register_post_accumulate_grad_hook), before the exchange between "
                    "replicas: use the gradient after backward instead"
                )

    def _check_complete(self, reduced: Reduced) -> None:
        missing = [
            module.name
            for number, module in enumerate(self.parameters.modules)
            if number not in reduced.flats
        ]
        if missing:
            raise ValueError(
                f"step {self.engine.step}: the FSDP modules {missing} have reduced no gradient in "
                "this backward, and others have: all of them must take part in every step, with "
                "the same set_requires_gradient_sync and set_requires_all_reduce"
            )


# Checks of the arguments of `attach_fsdp`, before a rank waits for another.


@dataclass(frozen=True, slots=True)
class Caller:
    """A function that takes FSDP models, for messages."""

    name: str
    argument: str
    """What it calls the ranks that have the same shard of every replica."""

    example: str

    @property
    def mesh(self) -> str:
        """How meshes, `fully_shard` and the call fit together."""
        return (
            "mesh = init_device_mesh(device, (sites, ranks_per_site), "
            'mesh_dim_names=("replicate", "shard")), fully_shard(model, mesh=mesh["shard"]), and '
            f"{self.example}"
        )


ATTACH = Caller("attach_fsdp", "replicate_group", 'attach_fsdp(model, mesh["replicate"])')
LOCAL_STEPS = Caller(
    "local_steps", "group", 'local_steps(model, optimizer, group=mesh["replicate"])'
)


def refuse_auto(**arguments: Any) -> None:
    """Raise ValueError for `auto`, which only `attach` has."""
    for name, value in arguments.items():
        if isinstance(value, str) and value == "auto":
            raise ValueError(f"attach_fsdp has no {name}='auto', as attach has: give a {name}")


def check_model(model: Any) -> None:
    """Raise for a model, or a version of torch, that cannot work, naming what is in the way."""
    if not hasattr(FSDPModule, "set_all_reduce_hook"):
        raise RuntimeError(f"attach_fsdp needs torch 2.7 or newer, this is {torch.__version__}")
    if isinstance(getattr(model, "_orig_mod", None), FSDPModule):
        raise TypeError("attach_fsdp needs the model itself: call it before torch.compile")
    if not isinstance(model, FSDPModule) or not isinstance(model, nn.Module):
        other = "use attach" if isinstance(model, DistributedDataParallel) else f"use {ATTACH.mesh}"
        raise TypeError(
            f"attach_fsdp needs a model that fully_shard was called with, got "
            f"{type(model).__name__}: {other}"
        )
    check_sharding(model, ATTACH)
    for name, group in _groups(model):
        if has_foreign_hook(group):
            raise ValueError(
                f"FSDP module {name!r} has an all-reduce hook already: if it is that of "
                "attach_fsdp, close() its handle first"
            )


def check_sharding(model: nn.Module, caller: Caller) -> None:
    """Raise where a parameter is not sharded by FSDP alone, over a mesh of one dimension."""
    for name, group in _groups(model):
        if group._is_hsdp or group.mesh_info.mesh.ndim != 1:
            raise ValueError(
                f"FSDP module {name!r} is on a mesh of {group.mesh_info.mesh.ndim} dimensions, "
                "where FSDP itself all-reduces gradients between replicas, densely: shard over a "
                f"mesh of one dimension. Use {caller.mesh}"
            )
        if any(each.is_dtensor for each in group.fsdp_params):
            raise TypeError(
                f"FSDP module {name!r} has parameters that were DTensors before fully_shard "
                f"(tensor parallelism): {caller.name} needs parameters that only FSDP shards"
            )
    _refuse_unmanaged(model)


def _groups(model: nn.Module) -> list[tuple[str, Any]]:
    """FSDP's records of the parameters that it reduces together, with the names of modules."""
    return [
        (name, group)
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
        for group in param_groups(module)
    ]


def _refuse_unmanaged(model: nn.Module) -> None:
    managed = {id(each.sharded_param) for _, group in _groups(model) for each in group.fsdp_params}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in managed:
            raise ValueError(
                f"parameter {name!r} is not sharded by FSDP (ignored_params), so FSDP reduces no "
                "gradient of it and the ranks would drift apart: shard it too, or freeze it"
            )


def check_modules(modules: list[ShardedModule], caller: Caller = ATTACH) -> None:
    """Raise ValueError where nothing is trained, or not all is sharded over the same ranks."""
    if not modules:
        raise ValueError("no parameter of this model requires gradients: nothing is trained")
    first = shard_ranks(modules[0])
    for module in modules:
        ranks = shard_ranks(module)
        if ranks != first:
            raise ValueError(
                f"FSDP modules {modules[0].name!r} and {module.name!r} are sharded over different "
                f"ranks, {first} and {ranks}: {caller.name} needs one mesh for all of them"
            )


def as_group(replicas: Any, caller: Caller = ATTACH) -> dist.ProcessGroup:
    """The process group of the replicas, also from a mesh of one dimension."""
    try:
        return as_process_group(caller.argument, replicas)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{error}. It must have the ranks that have the same shard of every replica. Use "
            f"{caller.mesh}"
        ) from None


def check_grid(replicas: list[int], shards: list[int], caller: Caller = ATTACH) -> None:
    """Raise ValueError unless replicas times shards are all ranks of the job, in order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if len(set(replicas) | set(shards)) != len(replicas) + len(shards) - 1:
        raise ValueError(
            f"rank {rank}: the {caller.argument} {replicas} and the ranks {shards} that the model "
            f"is sharded over must have exactly this rank in common. Use {caller.mesh}"
        )
    if len(replicas) * len(shards) != size:
        raise ValueError(
            f"{len(replicas)} replicas of {len(shards)} shards are {len(replicas) * len(shards)} "
            f"ranks, and the job has {size}: {caller.name} needs all of them"
        )
    if shards != sorted(shards) or replicas != sorted(replicas):
        raise ValueError(
            f"rank {rank}: the ranks of a mesh must be in ascending order, got {shards} and "
            f"{replicas}. Use {caller.mesh}"
        )


# `WeightShards`: FSDP2 inside a site. A rank exchanges its own shards of the weights.
#
# The ranks that have the same shard at the other sites have it in the same size, as their meshes
# are the same. So no padding is needed, and a shard of no entries is as good as any other.


class WeightShards(ShardLayout):
    """This rank's shards. Which parameters travel dense is decided by whole tensors."""

    def stored(self) -> dict[str, Tensor]:
        """This rank's shards, by name.

        Whoever writes to them wants FSDP to gather them anew: after a forward without a backward it
        still has the root's parameters whole, as they were.
        """
        reshard(self._model)
        return super().stored()

    @property
    def device(self) -> torch.device:
        """Where the optimizer has its weights: with CPU offload, not where gradients are made."""
        return ParameterLayout.device.__get__(self)

    def numel(self, name: str) -> int:
        return self.shard(name).numel()


def weight_shards(model: nn.Module, policy: Policy) -> WeightShards:
    """The layout of a model that FSDP2 shards; TypeError or ValueError if it cannot be used."""
    reshard(model)
    check_sharding(model, LOCAL_STEPS)
    modules = sharded_modules(model)
    check_modules(modules, LOCAL_STEPS)
    return WeightShards(model, modules, policy)


def sharded_ranks(parameters: WeightShards, group: Any, timeout: float | None) -> ShardedRanks:
    """The ranks of the job, where `group` goes across sites; ValueError if they are no grid."""
    across = dist.get_process_group_ranks(as_group(group, LOCAL_STEPS))
    inside = shard_ranks(parameters.modules[0])
    check_grid(across, inside, LOCAL_STEPS)
    everyone = dist.group.WORLD
    limit = time_limit(timeout, everyone)
    return ShardedRanks(group=everyone, comm=None, timeout=limit, across=across, inside=inside)
