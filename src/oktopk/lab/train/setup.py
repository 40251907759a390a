# SPDX-License-Identifier: Apache-2.0
"""From a config to a run: checks ahead, the task, the model, the optimizer, the exchange,
the target.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from oktopk.adapters.ddp_handle import Handle
from oktopk.adapters.link import compile_kernels
from oktopk.comm.communicator import Comm
from oktopk.errors import RunError
from oktopk.kernels.ready import make_ready
from oktopk.lab.baselines import BASELINE_NAMES
from oktopk.lab.runlog.reader import check_writable
from oktopk.lab.runlog.schema import ProbeRecord
from oktopk.lab.runlog.writer import RunTotals
from oktopk.lab.tasks.base import AUTO, Metric, Task, TaskOptions, checked, checked_task
from oktopk.lab.tasks.registry import is_path, packages_of, task_error, task_type
from oktopk.lab.train.config import LOCAL_STEPS, Config, parse_overrides
from oktopk.lab.train.console import LineHandler, print_line
from oktopk.lab.train.exchange import Exchange, make_exchange
from oktopk.lab.train.validate import Validation, all_or_raise, check_evaluate, check_same_data
from oktopk.launch.network import refuse_delay
from oktopk.launch.ranks import RankEnvironment
from oktopk.methods.selection import top_k
from oktopk.utils.arguments import did_you_mean
from oktopk.utils.extras import require

# Probes measure how good the selection was, every few steps, at the cost of a dense allreduce.
#
# The accumulated gradients summed over ranks are the exchanged result plus the residuals summed
# over ranks, because nothing is lost. So the dense sum, of which an exact selection would take the
# top k, can be computed after the step from the residuals. The exchange is not involved: a run
# with probes ends with the same bits as a run without.


class Probe:
    """Measures every `every`-th step of the sparse phase.

    A probed step costs a copy of the residual, a dense allreduce of 2n entries, and an exact top k
    on every rank. Every other step costs one pass over the gradient, for the ages. Memory is n
    entries, and 4n in a probed step.
    """

    def __init__(
        self,
        every: int,
        parameters: dict[str, torch.nn.Parameter],
        handle: Handle,
        comm: Comm,
    ) -> None:
        dense = set(handle.dense_parameters)
        self._every, self._comm, self._handle = every, comm, handle
        self._parameters = {n: p for n, p in parameters.items() if n not in dense}
        self._num_dense = sum(p.numel() for n, p in parameters.items() if n in dense)
        self._residual: Tensor | None = None
        self._last: Tensor | None = None  # the step in which an entry was last exchanged

    def before(self, step: int) -> None:
        """Copy the residual if this step is probed. Called before backward."""
        due = (step + 1) % self._every == 0
        self._residual = self._flat(self._handle.residuals) if due else None

    def after(self) -> ProbeRecord | None:
        """Measure the step if it is probed. Called after backward, before gradients are changed.

        Collective. The result is the same on every rank, except for the ages.
        """
        stats = self._handle.stats
        if stats is None or stats.skipped:
            return None
        started = time.perf_counter()
        applied = self._flat({n: p.grad for n, p in self._parameters.items() if p.grad is not None})
        if self._last is None:
            self._last = torch.full_like(applied, stats.step - 1, dtype=torch.int32)
        # the dense phase exchanges every entry, also zeros
        exchanged = (applied != 0) | (stats.phase == "dense")
        self._last.masked_fill_(exchanged, stats.step)
        if stats.phase == "dense" or self._residual is None:
            return None
        residual = self._flat(self._handle.residuals)
        self._rescale(self._handle.driver.lr_factors)
        sums = torch.stack([residual, residual - self._residual])
        acc, grad = self._comm.all_reduce_(sums, stage="probe") / self._comm.size + applied
        # the exchange applies more than it selected by this factor, and puts it into the residual
        selected = applied / (1 + self._handle.settings.overshoot_at(stats.step))
        quality = selection_quality(acc, grad, selected, stats.k - self._num_dense)
        ages = self._ages(residual, stats.step)
        means = self._mean_ages(residual, stats.step)
        seconds = time.perf_counter() - started
        return ProbeRecord(step=stats.step, seconds=seconds, ages=means, **quality, **ages)

    def _rescale(self, factors: dict[str, float]) -> None:
        """Scale the copied residual as the exchange did when the learning rate changed."""
        assert self._residual is not None
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        for name, part in zip(self._parameters, self._residual.split(sizes), strict=True):
            part.mul_(factors.get(name, 1.0))

    def _ages(self, residual: Tensor, step: int) -> dict[str, float]:
        """Steps since the entries in this rank's residual were last exchanged."""
        assert self._last is not None
        since = (step - self._last).float()
        ages = since[residual != 0]
        if not len(ages):
            ages = since.new_zeros(1)
        rank = max(1, round(0.9 * len(ages)))
        return {
            "age_mean": ages.mean().item(),
            "age_90": ages.kthvalue(rank).values.item(),
            "age_most": ages.max().item(),
        }

    def _mean_ages(self, residual: Tensor, step: int) -> dict[str, float | None]:
        """The mean age by parameter; 0 where the residual is empty."""
        assert self._last is not None
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        since, waiting = (step - self._last).float().split(sizes), (residual != 0).split(sizes)
        parts = zip(self._parameters, since, waiting, strict=True)
        return {n: age[mask].mean().item() if mask.any() else 0.0 for n, age, mask in parts}

    def _flat(self, tensors: dict[str, Tensor]) -> Tensor:
        """A flat copy of the parameters that are exchanged sparsely; zeros where one is missing."""
        parts = [
            tensors[name].detach().flatten().float()
            if name in tensors
            else parameter.new_zeros(parameter.numel(), dtype=torch.float32)
            for name, parameter in self._parameters.items()
        ]
        return torch.cat(parts) if parts else torch.zeros(0)


def selection_quality(acc: Tensor, grad: Tensor, result: Tensor, k: int) -> dict[str, float]:
    """Compare a result with the exact top k of the mean `acc`. O(n) and one selection.

    `recall` is the share of the exact top k that is in the result. `energy` and `best_energy` are
    the shares of the sum of squares that the entries of the result and of the exact top k hold.
    `xi` is the distance of the result from the exact top k over the norm of the mean gradient.
    """
    best, _ = top_k(acc, min(k, acc.numel()))
    top = best.to_dense()
    num_best = torch.count_nonzero(top).item()
    whole, norm = _energy(acc), _energy(grad) ** 0.5
    distance = _energy(top - result) ** 0.5
    return {
        "recall": ((top != 0) & (result != 0)).sum().item() / num_best if num_best else 1.0,
        "energy": _energy(acc[result != 0]) / whole if whole else 1.0,
        "best_energy": _energy(best.values) / whole if whole else 1.0,
        "xi": distance / norm if norm else 0.0,
    }


def _energy(x: Tensor) -> float:
    """Sum of squares."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2


# The target of a run, as in `--until "wer<0.3"`: the run ends when a metric has reached it.


ALIASES = {"loss": "val_loss"}


@dataclass(frozen=True, slots=True)
class Target:
    """A value of a metric that is good enough."""

    metric: Metric
    value: float

    def __str__(self) -> str:
        sign = ">=" if self.metric.higher_is_better else "<="
        return f"{self.metric.label} {sign} {self.value:g}"

    def is_reached(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether these metrics of a validation are as good as the target."""
        found = metrics.get(self.metric.name)
        if found is None or math.isnan(found):
            return False
        return found >= self.value if self.metric.higher_is_better else found <= self.value


def parse_target(text: str, metrics: Sequence[Metric]) -> Target:
    """The target of a text such as `wer<0.3`, `accuracy>0.9` or `loss=1.88`. ValueError if wrong.

    Which side of the value is better depends on the metric; `=` leaves that to it.
    """
    found = re.fullmatch(r"\s*(\w+)\s*(<=|>=|==|<|>|=)\s*(\S+)\s*", text)
    if found is None:
        sign = ">" if metrics[0].higher_is_better else "<"
        example = f"{metrics[0].name}{sign}0.3"
        raise ValueError(f"until must be a metric and a value, as in '{example}', got {text!r}")
    name, sign, number = found.groups()
    names = {metric.name: metric for metric in metrics}
    metric = names.get(name) or names.get(ALIASES.get(name, ""))
    if metric is None:
        aliases = [alias for alias, real in ALIASES.items() if real in names]
        hint = did_you_mean(name, [*names, *aliases])
        raise ValueError(
            f"until: this task has no metric {name!r}; it has {', '.join(names)}{hint}"
        )
    wrong = "<" if metric.higher_is_better else ">"
    if sign.startswith(wrong):
        better, right = ("higher", ">") if metric.higher_is_better else ("lower", "<")
        raise ValueError(
            f"until: {name} is better when it is {better}: write '{name}{right}{number}'"
        )
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"until: {number!r} is not a finite number, in {text!r}")
    _refuse_unreachable(metric, value, f"{name}{sign}{number}")
    return Target(metric, value)


def _refuse_unreachable(metric: Metric, value: float, text: str) -> None:
    if metric.best is None:
        return
    beyond = value - metric.best if metric.higher_is_better else metric.best - value
    excluded = beyond == 0 and re.search("[<>](?!=)", text) is not None
    if beyond > 0 or excluded:
        hint = f": write '{metric.name}={metric.best:g}' for the best there is" if excluded else ""
        raise ValueError(
            f"until: {metric.name} cannot be better than {metric.best:g}, got {text!r}{hint}"
        )


# Set up a run: the task, the model, the optimizer and the exchange.


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


# What is checked before any worker starts, and needs no other rank.


def check_before_start(command: str, config: Config) -> None:
    """Check packages, runs folder, network, target and data; `command` is who needs them."""
    require(f"{command} --task {config.task}", *packages_of(config.task))
    check_writable(Path(config.runs))
    refuse_delay(config.network)
    task = task_type(config.task)
    if config.until:
        parse_target(config.until, task.metrics)
    _call(config, task.check)


def prepare_data(config: Config) -> None:
    """Get, check and cache the data in this process, before any worker starts.

    So what is wrong with it is said once. One rank of every machine does it again: it finds the
    cache, or is the first where a launcher started the ranks.
    """
    handler, level = LineHandler(), log.level
    log.addHandler(handler)  # it may take a while, and says what it does
    log.setLevel(logging.INFO)
    try:
        _call(config, task_type(config.task).prepare)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def prepare_kernels() -> None:
    """Compile the kernels in this process, before any worker starts: then the workers load them.

    So no run has a clock on which they are compiled, whichever is the first.
    """
    if torch.cuda.is_available():  # workers with a GPU use other kernels
        return
    compiled = make_ready([torch.float32], _show_compiling)
    if compiled is not None:
        print_line(f"{_line_start()}{compiled}")


def _show_compiling(done: int, total: int) -> None:
    """Rewrite one line on a terminal; elsewhere print one at the start."""
    if sys.stdout.isatty() or not done:
        end = "" if sys.stdout.isatty() else "\n"
        sys.stdout.write(f"{_line_start()}compiling kernels: {done} of {total}{end}")
        sys.stdout.flush()


def _line_start() -> str:
    return "\r" if sys.stdout.isatty() else ""


def _call(config: Config, method: Callable[[TaskOptions], None]) -> None:
    """Call a method of the task; a mistake in a file of a user is one line with its number."""
    try:
        method(config.options)
    except Exception as error:
        if isinstance(error, ValueError | OSError | RunError) or not is_path(config.task):
            raise
        raise task_error(config.task, method.__name__, error) from error


# The learning rate of a step in closed form, so that a checkpoint need not hold it.


def learning_rate(config: Config, epoch: int, step: int, total: int) -> float:
    """lr / decay^epoch, times a linear rise over the first steps, times a cosine to the end.

    The cosine ends after `lr_steps` or `total` steps; from there on its value is `lr_final`.
    """
    rise = min(1.0, (step + 1) / config.lr_warmup) if config.lr_warmup else 1.0
    end = config.lr_steps or total
    along = 0.5 * (1 + math.cos(math.pi * min(step, end) / end))
    fall = config.lr_final + (1 - config.lr_final) * along
    return config.lr / config.lr_decay**epoch * rise * fall
