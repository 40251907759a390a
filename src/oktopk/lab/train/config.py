# SPDX-License-Identifier: Apache-2.0
"""`Config`: every setting of a run."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import Field, dataclass, field
from typing import Any, Literal, get_args

from oktopk.lab.baselines import BASELINE_NAMES
from oktopk.lab.tasks.base import (
    AUTO,
    LONGEST_NAME,
    RANGES,
    SMALLEST_RATE,
    TaskOptions,
    check_bounds,
    check_type,
    check_types,
    option,
    shown,
    specs_of,
)
from oktopk.lab.tasks.options import SpeechOptions
from oktopk.lab.tasks.registry import DEFAULT_TASK, TASKS, options_type
from oktopk.launch.network import check_network
from oktopk.methods import METHODS
from oktopk.optim.presets import FIELDS, Preset
from oktopk.optim.presets import FIELDS as PRESET_FIELDS
from oktopk.settings import (
    DEFAULT_GROUP_NUMEL,
    DENSITY,
    LOCAL_DENSITY,
    LOCAL_EVERY,
    WIRE,
    Scope,
    Settings,
)
from oktopk.utils.arguments import did_you_mean
from oktopk.wire import CodecName

# The settings with which a config overrides the optimizer's preset.
#
# A config has them as one text, `"overshoot=0.3,max_beta1=0.3"`, instead of a field for each: what
# is not in the text is as the preset says, without a value that stands for "not set".


NAMES = (*FIELDS, "max_beta1")
FOR_ADAM = ("staleness_correction", "max_beta1")
EXAMPLE = "overshoot=0.3,max_beta1=0.3"

Overrides = dict[str, Any]
"""Fields of `Settings`."""


def parse_overrides(text: str) -> Overrides:
    """The settings in a text of `name=value` pairs. ValueError names what is wrong."""
    overrides: Overrides = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in pair.partition("="))
        if name not in NAMES or not equals:
            raise ValueError(
                f"overrides must be like {EXAMPLE!r} with {', '.join(NAMES)}, got {pair!r}"
            )
        try:
            if name in overrides:
                raise ValueError("it is there twice")
            overrides[name] = tomllib.loads(f"value = {value.lower()}")["value"]
            Settings(**{name: overrides[name]})  # checks the type and the range
        except (tomllib.TOMLDecodeError, TypeError, ValueError) as error:
            raise ValueError(f"overrides: {name}={value}: {error}") from error
    return overrides


def preset_options(preset: str, overrides: str) -> Overrides:
    """Arguments of `attach`: nothing for the optimizer's preset, or all of plain error feedback."""
    plain = Preset(why="")
    options = {name: getattr(plain, name) for name in FIELDS} if preset == "none" else {}
    return options | parse_overrides(overrides)


LOCAL_STEPS = "local_steps"
"""The method that exchanges weight changes every few steps (`oktopk.local_steps`)."""

USUAL: dict[str, dict[str, Any]] = {
    LOCAL_STEPS: {"every": LOCAL_EVERY, "density": LOCAL_DENSITY},
    "sparseloco": {"density": 64 / 4096},  # as published
}
"""Settings of a method that differ from the defaults: for whoever asks for the method alone."""

RENAMED = {
    "remedies": "preset",
    "advance": "overshoot in overrides",
    "beta1": "max_beta1 in overrides",
    "late_moments": "staleness_correction in overrides",
    "follow_rate": "rescale_with_lr in overrides",
}
"""Settings that had another name in earlier versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The settings of one run. They are checked when it is made; an error names the field."""

    task: str = option(
        DEFAULT_TASK,
        f"what to train: {', '.join(TASKS)}, or a Python file with a task",
        fixed=True,
    )
    name: str = option("run", "name of the run; its folder is RUNS/NAME", harmless=True)
    runs: str = option("runs", "where run folders are made", harmless=True)
    workers: int = option(
        8, "processes to start on this machine; a launcher's number takes precedence"
    )
    network: str = option(
        "", "run the workers in a network of this rate, as in 100mbit or 50mbit:20ms; empty: as is"
    )
    seed: int = option(0, "seed of weights, order of batches and augmentation")
    timeout: float = option(
        300.0, "seconds a rank waits for the others before it gives up", harmless=True
    )

    epochs: int = option(10, "passes over the training data")
    max_steps: int = option(0, "end the run after this many steps; 0: no limit")
    max_minutes: float = option(
        0.0, "end the run after this many minutes of training, without validation; 0: no limit"
    )
    until: str = option(
        "", "end the run when a metric is reached, as in 'loss<2' (val_loss); empty: never"
    )
    batch: int = option(8, "examples per worker and backward pass")
    accumulate: int = option(1, "backward passes per step; their gradients are averaged")
    optimizer: str = option("sgd", "the optimizer", "sgd", "adamw", fixed=True)
    lr: float = option(0.01, "learning rate of the first epoch")
    lr_decay: float = option(1.01, "the learning rate of epoch e is lr / lr_decay^e")
    lr_warmup: int = option(0, "steps over which the learning rate rises linearly to lr")
    lr_final: float = option(1.0, "fraction of lr that a cosine schedule ends at")
    lr_steps: int = option(0, "steps after which the cosine schedule has ended; 0: all epochs")
    momentum: float = option(0.9, "momentum of SGD")
    beta2: float = option(0.999, "second beta of AdamW")
    weight_decay: float = option(1e-4, "weight decay of either optimizer")
    clip_before: float = option(
        0.0, "norm to which each worker clips its gradient before the exchange; 0: off"
    )
    clip_after: float = option(400.0, "norm to which the averaged gradient is clipped; 0: off")

    method: str = option(
        "oktopk",
        "how the workers exchange what they learn",
        *METHODS,
        "auto",
        LOCAL_STEPS,
        *BASELINE_NAMES,
        fixed=True,
    )
    every: int = option(
        32,
        "steps between exchanges of local_steps, diloco, sparseloco and post_local_sgd",
        fixed=True,
    )
    delay: int = option(
        0,
        "steps for which an exchange of local_steps runs beside the training; less than every",
        fixed=True,
    )
    fragments: int = option(
        1, "parts of the model that local_steps exchanges in turn; at most every", fixed=True
    )
    density: float | Literal["auto"] = option(
        DENSITY,
        "fraction that is kept (with local_steps: by all workers together), or auto: as measured",
        or_auto=float,
    )
    wire: str = option(
        WIRE,
        f"how entries are encoded; auto: the fastest with density auto, else {WIRE}",
        *get_args(CodecName),
        AUTO,
    )
    warmup_steps: int | Literal["auto"] = option(
        AUTO, "dense steps at first; auto: by the method and the length of the run", or_auto=int
    )
    ramp_steps: int | Literal["auto"] = option(
        AUTO,
        "steps after the warm-up in which the density falls from 25 %; auto: half of the rest",
        or_auto=int,
    )
    exact_every: int = option(32, "steps between exact thresholds over the whole model")
    bounds_every: int = option(64, "steps between updates of the region bounds")
    group_numel: int | Literal["auto"] = option(
        DEFAULT_GROUP_NUMEL,
        "entries of consecutive buckets that are exchanged together, or auto: as measured",
        or_auto=int,
    )
    scope: str = option(
        "model", "select entries of the whole model or of every bucket", *get_args(Scope)
    )
    preset: str = option("auto", "the optimizer's preset, or plain error feedback", "auto", "none")
    overrides: str = option(
        "", f"settings that override the preset: {EXAMPLE} (also {', '.join(PRESET_FIELDS[1:])})"
    )

    validate_every: int = option(
        5, "epochs between validations; the first and last are always validated"
    )
    validate_steps: int = option(0, "steps between further validations; 0: none")
    validate_batch: int = option(16, "examples per validation batch")
    samples: int = option(4, "validation results to show as text", harmless=True)

    log_every: int = option(
        10, "steps between writes of the metrics, and between lines of output", harmless=True
    )
    probe_every: int = option(
        0, "steps between probes of the selection quality; 0: none", harmless=True
    )
    histogram_every: int = option(
        0,
        "steps between histograms; 0: after 1, 2, 4, 8, ... steps. There are always some at the "
        "start of the sparse phase and at the ends of epochs and of the run",
        harmless=True,
    )
    checkpoint_every: int = option(
        0, "steps between checkpoints; 0: after each epoch", harmless=True
    )
    keep: int = option(2, "checkpoints to keep", harmless=True)

    options: TaskOptions = field(default_factory=SpeechOptions)
    """The settings of the task."""

    def __post_init__(self) -> None:
        check_types(self)
        kind = options_type(self.task)
        if type(self.options) is not kind:
            raise ValueError(f"task {self.task} needs {kind.__name__}, got {self.options!r}")
        if not re.fullmatch(r"[\w.-]*\w", self.name) or len(self.name.encode()) > LONGEST_NAME:
            raise ValueError(
                "name must be letters, digits, '.', '_' and '-', at most "
                f"{LONGEST_NAME} bytes, got {shown(self.name)}"
            )
        for name in ("density", "lr_final"):
            value = getattr(self, name)
            if value != AUTO and not 0 < value <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {shown(value)}")
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {shown(self.lr)}")
        for name, bounds in RANGES.items():
            if (value := getattr(self, name)) != AUTO:
                check_bounds(name, value, bounds)
        if self.network:
            check_network(self.network)
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Check values that depend on one another."""
        if self.clip_before and self.method in (LOCAL_STEPS, *BASELINE_NAMES):
            raise ValueError(f"clip_before has no effect with {self.method}: use clip_after")
        if self.density == AUTO and self.method in (*BASELINE_NAMES, "dense"):
            raise ValueError(f"density = auto has no effect with {self.method}: give a number")
        self._check_streaming()
        for name, value in parse_overrides(self.overrides).items():
            if name in FOR_ADAM and value is not False and self.optimizer != "adamw":
                raise ValueError(
                    f"overrides: {name}={value} is for adamw; optimizer is {self.optimizer}"
                )
        if (self.epochs - 1) * math.log(self.lr_decay) > -math.log(SMALLEST_RATE):
            raise ValueError(
                f"lr_decay = {self.lr_decay} over epochs = {self.epochs} makes the learning rate "
                "0: lower one of them"
            )

    def _check_streaming(self) -> None:
        for name, most in (("delay", self.every - 1), ("fragments", self.every)):
            value = getattr(self, name)
            if value > most and self.method == LOCAL_STEPS:
                raise ValueError(
                    f"{name} must be at most {most} with every = {self.every}, got {value}"
                )


COMMON = specs_of(Config)
"""The settings that every task has, by name."""


def specs(task: str) -> dict[str, Field[Any]]:
    """All settings of a run of this task, by name."""
    return COMMON | specs_of(options_type(task))


def as_dict(config: Config) -> dict[str, Any]:
    """All settings by name, those of the task beside the others."""
    common = {name: getattr(config, name) for name in COMMON}
    return common | {name: getattr(config.options, name) for name in specs_of(type(config.options))}


def make_config(**values: Any) -> Config:
    """The config with these settings, those of the task beside the others; others at default."""
    task = values.get("task", DEFAULT_TASK)
    check_type("task", task, str)
    known = specs(task)
    for name in values:
        if name not in known:
            raise ValueError(f"task {task} has no setting {shown(name)}{nearest(name, known)}")
    values = USUAL.get(str(values.get("method")), {}) | values
    own = {name: value for name, value in values.items() if name not in COMMON}
    common = {name: value for name, value in values.items() if name in COMMON}
    kind = options_type(task)
    unknown = [name for name in own if name not in specs_of(kind)]
    if unknown:
        raise ValueError(f"the task {task} has no setting {shown(unknown[0])}")
    return Config(**common, options=kind(**own))


def with_settings(config: Config, **changed: Any) -> Config:
    """The config with some settings changed; they may be those of the task."""
    return make_config(**(as_dict(config) | changed))


def names_with(config: Config, mark: str) -> list[str]:
    """The settings of a run that are marked as `fixed` or `harmless`."""
    return [name for name, spec in specs(config.task).items() if spec.metadata[mark]]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the present name of a renamed setting, or at the most similar known name.

    Empty when there is neither.
    """
    setting = name.lstrip("-").replace("-", "_")
    if setting in RENAMED:
        return f"; {setting} is now {RENAMED[setting]}"
    return did_you_mean(name, known)


def changes(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """The settings in which two configs differ, with both values; None where one has none."""
    before, after = as_dict(one), as_dict(other)
    both = {name: (before.get(name), after.get(name)) for name in before | after}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}
