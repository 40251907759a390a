# SPDX-License-Identifier: Apache-2.0
"""`local_steps`: ranks train alone, and exchange their weight changes every so many steps."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from oktopk.adapters.announcement import describe_buffers, describe_local_steps
from oktopk.adapters.budget import AUTO, Budget, BudgetOptions, budget_options, start_budget
from oktopk.adapters.buffers import RoundBuffers, described_buffers
from oktopk.adapters.driver import OnStep
from oktopk.adapters.handle import Connection, note_open, refuse_other_exchange
from oktopk.adapters.link import Links, Ranks, compile_kernels, describe_parameters, ranks_of
from oktopk.adapters.local_driver import SHARED_METHOD, OuterOptions, RoundDriver
from oktopk.adapters.local_handle import LocalSteps
from oktopk.adapters.local_notices import is_hooked, optimizers_of
from oktopk.adapters.local_state import divide
from oktopk.adapters.parameters import (
    ParameterLayout,
    Policy,
    check_devices,
    check_optimizer,
    check_types,
    is_on_cuda,
)
from oktopk.comm.communicator import Comm, broadcast_
from oktopk.errors import ExchangeError
from oktopk.exchange.layout import MAX_INDEXABLE
from oktopk.methods import METHODS
from oktopk.methods.base import Average
from oktopk.optim.staleness import is_dtensor, local_shard
from oktopk.settings import LOCAL_DENSITY, LOCAL_EVERY, WIRE, Settings
from oktopk.utils.arguments import choice, flag
from oktopk.utils.console import announce
from oktopk.wire import CodecName

# What `local_steps` needs of a model and an optimizer.


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards a part of it. Its import takes half a second: where nobody has imported
    it, it does not."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(each, fsdp.FSDPModule) for each in model.modules())


def parameters_of(
    model: nn.Module, group: Any, comm: Comm | None, timeout: float | None, policy: Policy
) -> tuple[ParameterLayout, Ranks]:
    """The layout of what a rank exchanges of the model, and with which ranks.

    TypeError or ValueError if it cannot be exchanged.
    """
    if is_sharded(model):
        from oktopk.adapters.fsdp_driver import sharded_ranks, weight_shards

        layout = weight_shards(model, policy)
        ranks = sharded_ranks(layout, group, timeout)
    else:
        layout = ParameterLayout(dict(model.named_parameters()), policy)
        ranks = ranks_of(group, comm, timeout)
        for name, parameter in layout.parameters.items():
            _refuse_dtensor(name, parameter)
    return layout, ranks


def check_parameters(layout: ParameterLayout, settings: Settings) -> None:
    """Raise TypeError or ValueError for parameters that cannot be exchanged."""
    for name, parameter in layout.parameters.items():
        _check_dtype(name, parameter)
    if not layout.parameters:
        raise ValueError("no parameter of this model requires gradients: nothing is trained")
    numel = sum(layout.numel(name) for name in layout.parameters)
    if numel > MAX_INDEXABLE and settings.method != "dense":
        raise ValueError(
            f"a rank has {numel} trainable entries, and no more than {MAX_INDEXABLE} can be "
            "selected together, as indices are int32: use method='dense', or freeze some parameters"
        )


def check_buffers(model: nn.Module) -> None:
    """Raise TypeError for a buffer that cannot be sent from rank 0 to the others."""
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise TypeError(
                f"buffer {name!r} has layout {buffer.layout}: local_steps gives all ranks the "
                "buffers of rank 0, which must be dense; keep this one dense, or as a plain "
                "attribute (self.name = tensor), which every rank makes for itself"
            )


def refuse_auto_in_site(model: nn.Module, *, sharded: bool) -> None:
    """Raise ValueError for `density="auto"` if a site has several ranks: each would choose by its
    own clock."""
    if sharded:
        raise ValueError(
            "density='auto' does not work with FSDP2, whose ranks would choose by shard and not by "
            "site: give a density"
        )
    if isinstance(model, DistributedDataParallel) and dist.get_world_size(model.process_group) > 1:
        raise ValueError(
            "density='auto' does not work with DistributedDataParallel inside a site: its ranks "
            "would choose by their own clocks, and no longer have the same weights; give a density"
        )


def refuse_dense_exchange(model: nn.Module, optimizer: Any, ranks: Ranks) -> None:
    """Raise ValueError where the same ranks exchange whole gradients or weights in every step."""
    zero = sys.modules.get("torch.distributed.optim")
    found: list[Any] = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if zero is not None:
        kind = zero.ZeroRedundancyOptimizer
        found += [each for each in optimizers_of(optimizer) if isinstance(each, kind)]
    for each in found:
        theirs = dist.get_process_group_ranks(each.process_group)
        shared = sorted(set(theirs).intersection(ranks.members))
        if len(shared) > 1:
            raise ValueError(
                f"{type(each).__name__} keeps the weights of ranks {shared} the same in every "
                "step, densely, so local_steps over these ranks would save nothing: pass the bare "
                "module (model.module) and train that, with an optimizer of its own on every rank; "
                "or, where these are the ranks of one site, pass as `group` the ranks across sites"
            )


def check_sharded(*, sharded: bool, comm: object) -> None:
    """Raise ValueError for arguments that do not work with a model that FSDP2 shards."""
    if sharded and comm is not None:
        raise ValueError("comm does not work with FSDP2, whose shards need one each: pass group")


def _refuse_dtensor(name: str, parameter: Tensor) -> None:
    if is_dtensor(parameter):
        raise TypeError(
            f"parameter {name!r} is a DTensor that fully_shard has not made (tensor parallelism): "
            "local_steps needs a plain module, DistributedDataParallel, or FSDP2 inside a site"
        )


def _check_dtype(name: str, parameter: Tensor) -> None:
    if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
        raise TypeError(
            f"parameter {name!r} is {parameter.dtype}: local_steps exchanges fp16, bf16, fp32 and "
            "float64 parameters; freeze it, or keep it in one of these"
        )


def checked_optimizers(optimizer: Any, parameters: ParameterLayout) -> list[Optimizer]:
    """Those of `optimizers_of`. The innermost must train the model."""
    optimizers = optimizers_of(optimizer)
    if not optimizers:
        raise TypeError(f"expected an optimizer or a scheduler, got {type(optimizer).__name__}")
    advice = "make it from model.parameters(), after the model was moved to its device, or sharded"
    check_optimizer(optimizers[-1], parameters.parameters.values(), advice)
    if any(map(is_hooked, optimizers)):
        raise ValueError("this optimizer has local steps already: close() their handle first")
    return optimizers


# `local_steps`: ranks train alone, and exchange their weight changes every so many steps.
#
# No wrapper around the model is needed: a hook after `optimizer.step()` counts the steps, and at
# the end of a round it runs the exchange, on the calling thread or, with a `delay`, in the
# background.


def local_steps(
    model: nn.Module,
    optimizer: Optimizer | LRScheduler,
    *,
    every: int = LOCAL_EVERY,
    density: float | Literal["auto"] = LOCAL_DENSITY,
    exchange_share: float = 0.2,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    delay: int = 0,
    mixing: float = 1.0,
    fragments: int = 1,
    decay: float = 0.95,
    average: Average = "senders",
    method: str = AUTO,
    policy: Policy | None = None,
    wire: CodecName | None = None,
    exact_every: int = 32,
    bounds_every: int = 64,
    on_nonfinite: Literal["skip", "raise"] = "skip",
    on_step: OnStep | None = None,
    check_every: int = 10,
    verbose: bool = True,
    timeout: float | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    comm: Comm | None = None,
) -> LocalSteps:
    """Train alone and exchange weight changes every `every` steps. Every rank must call it.

        outer = oktopk.local_steps(model, optimizer)

    All ranks take over the weights and buffers of rank 0. Each rank then trains with its own
    optimizer. After every `every`-th `optimizer.step()` the ranks exchange the largest entries of
    what their weights have changed by since the last exchange; what is not sent is kept for the
    next one. After an exchange all ranks have the same weights, to the bit. Where ranks may call
    `optimizer.step()` more or less often, let each of them end by `outer.finish()`, or train inside
    of `with oktopk.local_steps(model, optimizer) as outer:`.

    With `delay` the exchange runs in the background while the optimizer goes on, and with
    `fragments` it takes a part of the model at a time: then it is the anchor of a fragment, the
    weights that its last exchange led to, that all ranks have in common, to the bit.

    Args:
        model: any module on one device; or a `DistributedDataParallel` of the ranks of one site, or
            one that `fully_shard` shards over them, with `group` across sites. Only parameters that
            require gradients are exchanged, and float buffers that its state dict has, such as the
            statistics of batch norm: their means over ranks replace them.
        optimizer: any optimizer, or a scheduler of it. Its state stays on each rank.
        every: optimizer steps between two exchanges.
        density: fraction of the entries that an exchange delivers, in (0, 1]; or `auto`: every rank
            selects the highest fraction whose exchange stays under `exchange_share` on the network
            as measured in this run. It is revised as the network changes, the same on all ranks,
            and rank 0 announces a change.
        exchange_share: with density `auto`, the share of the time from one exchange to the end of
            the next that an exchange may take.
        outer_lr: learning rate of the outer step, which moves the weights by the mean change.
        outer_momentum: Nesterov momentum of the outer step, as in DiLoCo; 0 is none.
        delay: optimizer steps for which an exchange may run in the background, less than `every`; 0
            runs it inside `optimizer.step()`. It is launched at the end of a round, with the weight
            changes of that moment, and its result is applied `delay` steps later, under the steps
            that the rank has taken meanwhile.
        mixing: with a delay, the share of this rank's moves since the launch that is kept on top of
            the exchanged weights, in [0, 1]. Streaming DiLoCo mixes the exchanged weights with all
            of the rank's own, its moves before the launch included; here those are in the exchange
            alone, so no move is counted twice.
        fragments: parts of about equal size, in the order of the model, that are exchanged one
            after the other, each every `every` steps, so that traffic is even; at most `every`.
            Each has `density` by itself; a NaN in one of them rolls all of them back.
        decay: the residual is multiplied by this before each exchange. 1 is plain error feedback;
            a change that waited for long no longer fits weights that have moved on.
        average: divide each sum by the number of `senders` of that entry, or of `all` ranks.
        method: `auto`: every rank selects its share of the density, 1 of P, and all that was
            selected is delivered, which learns most with its bytes; or a name of `oktopk.METHODS`,
            with which every rank selects as much as `density` says.
        policy: which parameters travel dense; biases, norms and tiny ones by default.
        wire: how entries travel: `plain`, `fp32`, `bf16`, `fp16`, `int8`, `int4`, `int2` or
            `sign`. None: `int4`; with density `auto` the fastest of `plain`, `bf16` and `int4`.
        exact_every: exchanges between exact thresholds (`oktopk`).
        bounds_every: exchanges between updates of the region bounds (`oktopk`).
        on_nonfinite: when the weights of a rank have a NaN or Inf, all ranks go back to the weights
            and float buffers of the last exchange, and `skip` the exchange or `raise`.
        on_step: called with the `StepStats` of every finished exchange. An error in it is logged.
        check_every: exchanges between comparisons of the weights of all ranks; 0 is never.
        verbose: rank 0 announces in one line what will be exchanged, and the bytes.
        timeout: seconds a rank waits for the others before it raises; None: the timeout of the
            process group. The last third of them, at most 5 s, is for finding out which rank is
            missing.
        group: the ranks that exchange, as a process group or a mesh of one dimension; None is the
            default group, or this process alone. For a group of some ranks, torch asks that each of
            them is in equally many groups. With FSDP2, those that have the same shard at every
            site: one dimension of a mesh, of which `fully_shard` has the other.
        comm: an `oktopk.Comm` to exchange over, instead of a new process group of these ranks. It
            stays open when the handle is closed, but a failed exchange closes it.

    Returns:
        The handle: statistics of the last exchange, the state that a resume needs, and `close()`.

    Raises:
        TypeError: an argument has the wrong type, or the model is not a module.
        ValueError: an argument, the model or the process group cannot be used, or the ranks were
            called with different arguments. The message says what to do.
        ExchangeError: a rank did not take part within `timeout`; the message names it.
    """
    check_types(policy=policy, on_step=on_step, comm=comm)
    verbose = flag("verbose", verbose)
    choice("on_nonfinite", on_nonfinite, ("skip", "raise"))
    choice("method", method, (AUTO, *METHODS))
    budget = budget_options(density, wire, exchange_share, method)
    settings = Settings(
        method=SHARED_METHOD if method == AUTO else method,
        density=LOCAL_DENSITY if budget else density,  # pyright: ignore[reportArgumentType] - checked
        decay=decay,
        average=average,
        wire=WIRE if wire is None else wire,
        exact_every=exact_every,
        bounds_every=bounds_every,
        on_nonfinite=on_nonfinite,
    )
    options = OuterOptions(
        every=every,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        check_every=check_every,
        delay=delay,
        mixing=mixing,
        fragments=fragments,
    )
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if not isinstance(inner, nn.Module):
        raise TypeError(f"local_steps needs a torch.nn.Module, got {type(inner).__name__}")
    sharded = is_sharded(inner)
    check_sharded(sharded=sharded, comm=comm)
    if budget is not None:
        refuse_auto_in_site(model, sharded=sharded)
    if delay and (inner is not model or sharded) and is_on_cuda(inner):
        raise ValueError(
            f"delay={delay} does not work with DistributedDataParallel or FSDP2 on CUDA: their "
            "NCCL operations and those of the exchange would run side by side, in no order; use "
            "delay=0"
        )
    parameters, ranks = parameters_of(inner, group, comm, timeout, policy or Policy())
    check_parameters(parameters, settings)
    check_buffers(inner)
    refuse_dense_exchange(model, optimizer, ranks)
    refuse_other_exchange(parameters.parameters.values(), ranks.members, "weight changes")
    job = _Job(
        model=inner,
        parameters=parameters,
        fragments=divide(parameters, fragments),
        optimizers=checked_optimizers(optimizer, parameters),
        ranks=ranks,
        shares_density=method == AUTO,
        verbose=verbose,
    )
    compile_kernels(parameters.parameters.values(), tell=verbose and ranks.is_first)
    handle = _start(job, settings, options, on_step, budget)
    driver = handle.driver
    if verbose and driver.rank == 0:
        sizes, is_auto = (handle.comm.size, driver.engine.shards.size), budget is not None
        line = describe_local_steps(handle.settings, parameters, *sizes, options, is_auto)
        announce(line + describe_buffers(driver.buffers.nbytes, sizes[0], every))
    return handle


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What `local_steps` was called with, apart from the settings."""

    model: nn.Module
    parameters: ParameterLayout
    fragments: list[ParameterLayout]
    """The same parameters, in parts that are exchanged one after the other."""

    optimizers: list[Optimizer]
    """The one that was given, and those in it."""

    ranks: Ranks
    shares_density: bool
    """Whether the ranks share the density, instead of selecting as much each."""

    verbose: bool


def _start(
    job: _Job,
    settings: Settings,
    options: OuterOptions,
    on_step: OnStep | None,
    auto: BudgetOptions | None,
) -> LocalSteps:
    """Compare with the other ranks, connect, take over the weights, and register the hooks."""
    described = job.ranks.describe()
    backends = described.get("backend", "")
    check_devices(list(job.parameters.parameters.values()), backends, "local_steps")
    arguments = _arguments(job, settings, options, auto)
    values = arguments | described | describe_parameters(job.parameters)
    values |= described_buffers(job.model)
    prefix = job.ranks.agree(values, "local_steps", "oktopk.local_steps")

    def agree_to_load(values: dict[str, Any], step: int) -> None:
        job.ranks.agree(values, "load_state_dict", f"{prefix}.step-{step}")

    with ExitStack() as undo:  # nothing is left behind where one of these fails
        links = job.ranks.connect(job.fragments, undo)
        if job.shares_density:
            settings = replace(settings, shared_by=links.comm.size)
        budgets = _take_over(job, settings, auto, links)
        buffers = [RoundBuffers(job.model), *(RoundBuffers() for _ in job.fragments[1:])]
        each = budgets, _head_starts(options), links.shards, buffers
        drivers = [
            RoundDriver(
                settings, links.comm, parameters, options, on_step, budget, start, shards, own
            )
            for parameters, budget, start, shards, own in zip(job.fragments, *each, strict=True)
        ]
        connection = Connection(
            failure_detector=links.failure_detector,
            agree_to_load=agree_to_load,
            owns_comm=job.ranks.comm is None,
            everyone=links.everyone,
        )
        handle = LocalSteps(
            drivers, connection, job.model, job.optimizers, job.ranks, verbose=job.verbose
        )
        note_open(handle, job.parameters.parameters.values(), job.ranks.members)
        links.comm.is_attached = True
        undo.pop_all()
    return handle


def _take_over(
    job: _Job, settings: Settings, auto: BudgetOptions | None, links: Links
) -> list[Budget | None]:
    """Take over the weights and buffers of the first site, and start the budgets. Collective."""
    tensors = [*job.model.parameters(), *job.model.buffers()]
    try:
        broadcast_(map(local_shard, tensors), links.comm, stage="start")
        return _start_budgets(job, settings, auto, links.comm)
    except ExchangeError as error:
        # raises one that names the rank
        links.failure_detector.abort(error, links.everyone)
        raise


def _arguments(
    job: _Job, settings: Settings, options: OuterOptions, auto: BudgetOptions | None
) -> dict[str, Any]:
    """The arguments of `local_steps` that must be the same on every rank."""
    arguments = asdict(settings) | asdict(options) | {"shares_density": job.shares_density}
    arguments |= {"timeout": job.ranks.timeout, "comm": job.ranks.comm is not None}
    return arguments | ({"density": AUTO, **asdict(auto)} if auto else {})


def _head_starts(options: OuterOptions) -> list[int]:
    """By how much the first round of each fragment is shorter, so that they end at even intervals:
    after every/F, 2 every/F, ... steps."""
    every, num = options.every, options.fragments
    return [every - number * every // num for number in range(1, num + 1)]


def _start_budgets(
    job: _Job, settings: Settings, auto: BudgetOptions | None, comm: Comm
) -> list[Budget | None]:
    """One for each fragment: together they may take the share of the time that was asked for."""
    num = len(job.fragments)
    each = auto and replace(auto, share=auto.share / num)
    return [
        start_budget(each, settings, list(fragment.parameters.values()), comm, verbose=job.verbose)
        for fragment in job.fragments
    ]
