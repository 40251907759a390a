# SPDX-License-Identifier: Apache-2.0
"""Set up a run: the task, the model, the optimizer and the exchange."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from oktopk.adapters.compile_kernels import compile_kernels
from oktopk.adapters.ddp.handle import Handle
from oktopk.baselines.names import BASELINE_NAMES
from oktopk.comm.communicator import Comm
from oktopk.errors import RunError
from oktopk.launch.rank_environment import RankEnvironment
from oktopk.runlog.aggregates import RunTotals
from oktopk.runlog.schema import ProbeRecord
from oktopk.train.all_or_raise import all_or_raise, check_same_data
from oktopk.train.config import LOCAL_STEPS, Config
from oktopk.train.exchange import Exchange, make_exchange
from oktopk.train.option import AUTO
from oktopk.train.preset_options import parse_overrides
from oktopk.train.probe import Probe
from oktopk.train.target import Target, parse_target
from oktopk.train.tasks.base import Task
from oktopk.train.tasks.checks import checked, checked_task
from oktopk.train.tasks.registry import task_type
from oktopk.train.validate import Validation, check_evaluate

log = logging.getLogger("oktopk")

BETA1 = 0.9
RANK_SEEDS = 1_000_003
"""Distance of the seeds of two ranks."""


@dataclass(slots=True)
class Progress:
    """How far a run is. Together with the seed it determines the next batches."""

    epoch: int = 0
    index: int = 0
    """Steps finished in this epoch."""

    step: int = 0
    """Steps finished in the whole run."""

    loss_sum: float = 0.0
    """This rank's losses in this epoch, summed over `loss_count` backward passes."""

    loss_count: int = 0

    seconds: float = 0.0
    """Training time by the clock of rank 0, without validation; the same on every rank. It is
    brought up to date when the metrics are written."""

    target_reached: bool = False
    """Whether a validation has reached `until`."""


@dataclass(slots=True)
class Run:
    """The state of a training run on one rank."""

    config: Config
    comm: Comm
    device: torch.device
    env: RankEnvironment
    task: Task
    model: nn.Module
    optimizer: Optimizer
    exchange: Exchange
    steps_per_epoch: int
    planned_steps: int
    """Steps of all epochs, which the learning rate schedule is made for."""

    total_steps: int
    """Steps until the run ends: `max_steps` may end it earlier."""

    warmup_steps: int
    """Dense steps at first; 0 for an exchange that has none."""

    target: Target | None = None
    """The metric that ends the run."""

    progress: Progress = field(default_factory=Progress)
    totals: RunTotals = field(default_factory=RunTotals)
    skipped_in_a_row: int = 0
    probe: Probe | None = None
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings that were changed when the run was resumed: old and new value."""

    validation: Validation | None = None
    """The last validation of this process."""

    validated_at: int = -1
    """Steps that were finished at the last validation."""

    probed: ProbeRecord | None = None
    """What the probe measured in the last step; None if the step was not probed."""


def prepare_task(config: Config, comm: Comm, device: torch.device, env: RankEnvironment) -> Task:
    """Get and check the data once per machine, then read it on every rank. Collective."""
    kind, options = task_type(config.task), config.options

    def first() -> None:
        if env.local_rank == 0:
            kind.prepare(options)

    all_or_raise(comm, device, "preparing the data", first)
    task = all_or_raise(
        comm, device, "reading the data", lambda: checked_task(kind(options, config.seed))
    )
    mark = checked(task, "fingerprint()", task.fingerprint())
    check_same_data(comm, device, options.data or "the data of the task", mark)
    return task


def make_optimizer(config: Config, task: Task, model: torch.nn.Module) -> Optimizer:
    """SGD with momentum as in the original code, or AdamW."""
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        (decayed if task.uses_weight_decay(name, parameter) else others).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": config.weight_decay}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    if config.optimizer == "adamw":
        return AdamW(groups, lr=config.lr, betas=(BETA1, config.beta2))
    return SGD(groups, lr=config.lr, momentum=config.momentum)


def log_unused_options(config: Config) -> None:
    """Log the preset options that have no effect with the method."""
    overrides = parse_overrides(config.overrides)
    if not overrides:
        return
    if config.method == "dense":
        log.info("%s: without effect, since dense sends everything", ", ".join(overrides))
    if config.method in (LOCAL_STEPS, *BASELINE_NAMES):
        log.info("%s: without effect with %s", ", ".join(overrides), config.method)


def make_probe(config: Config, model: nn.Module, handle: Handle | None, comm: Comm) -> Probe | None:
    """The probe, if the config has one and the exchange selects."""
    if not config.probe_every or handle is None:
        return None
    return Probe(config.probe_every, dict(model.named_parameters()), handle, comm)


def count_steps(config: Config, task: Task, ranks: int) -> int:
    """Steps of an epoch. RunError if the examples do not fill one."""
    per_step = config.batch * ranks * config.accumulate
    if task.num_train < per_step:
        raise RunError(
            f"{task.num_train} training {task.unit} do not fill one step of {ranks} workers x "
            f"batch {config.batch} x accumulate {config.accumulate} = {per_step}: lower batch, "
            "accumulate or workers"
        )
    return task.num_train // per_step


def with_known_start(config: Config, settings: dict[str, Any]) -> Config:
    """The config with the numbers that `auto` has become in the settings of the exchange.

    They are stored with the run, so a run that is resumed for longer keeps its start.
    """
    known: dict[str, int] = {}
    if config.warmup_steps == AUTO and "warmup_steps" in settings:
        known["warmup_steps"] = settings["warmup_steps"]
    if config.ramp_steps == AUTO and "schedule" in settings:
        known["ramp_steps"] = sum(steps for steps, _ in settings["schedule"])
    return replace(config, **known) if config.method != LOCAL_STEPS else config


def set_up(config: Config, comm: Comm, device: torch.device, env: RankEnvironment) -> Run:
    """Set up everything. DDP gives every rank the weights of rank 0."""
    task = prepare_task(config, comm, device, env)
    target = parse_target(config.until, task.metrics) if config.until else None
    steps_per_epoch = count_steps(config, task, comm.size)
    planned = config.epochs * steps_per_epoch
    total = min(planned, config.max_steps) if config.max_steps else planned
    torch.manual_seed(config.seed)
    model = checked(task, "build_model()", task.build_model()).to(device)
    compile_kernels(model.parameters(), tell=comm.rank == 0)  # whatever the method: all start alike
    log_unused_options(config)
    optimizer = make_optimizer(config, task, model)
    exchange = make_exchange(config, model, optimizer, comm.size, total)
    config = with_known_start(config, exchange.settings)
    shows = comm.rank == 0 and config.samples > 0
    all_or_raise(
        comm, device, "evaluating two examples", lambda: check_evaluate(task, model, device, shows)
    )
    torch.manual_seed((config.seed + RANK_SEEDS * (comm.rank + 1)) % 2**63)  # other dropout masks
    return Run(
        config=config,
        comm=comm,
        device=device,
        env=env,
        task=task,
        model=model,
        optimizer=exchange.optimizer,
        exchange=exchange,
        steps_per_epoch=steps_per_epoch,
        planned_steps=planned,
        total_steps=total,
        warmup_steps=exchange.settings.get("warmup_steps", 0),
        target=target,
        probe=make_probe(config, model, exchange.handle, comm),
    )
