"""`Config`: every setting of a run, from a TOML file and flags.

The defaults are the settings of the original code for lstman4; a file in `configs/` holds only what
it changes. Every field is also a flag. An unknown name is refused with a hint at the nearest one.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from oktopk.methods import METHODS
from oktopk.optim.presets import FIELDS as PRESET_FIELDS
from oktopk.settings import Scope
from oktopk.train.bounds import (
    LONGEST_NAME,
    MOST_WEIGHTS,
    RANGES,
    SMALLEST_RATE,
    check_type,
    shown,
)
from oktopk.train.preset_options import EXAMPLE, FOR_ADAM, parse_overrides
from oktopk.utils.files import (
    file_error,
    is_file,
    parse_toml,
    read_text,
)
from oktopk.utils.units import list_some
from oktopk.wire.codec import CodecName

SHIPPED = Path(__file__).parent / "configs"
DEFAULT = "quickstart"
MOST_BYTES = 2**20
"""Largest size of a config file."""

RENAMED = {
    "remedies": "preset",
    "advance": "overshoot in overrides",
    "beta1": "max_beta1 in overrides",
    "late_moments": "staleness_correction in overrides",
    "follow_rate": "rescale_with_lr in overrides",
}
"""Settings that had another name in earlier versions."""

AS_IT_WAS = "resume with the version that started the run, or start another with --name"


def option(default: Any, text: str, *choices: str) -> Any:
    """A field with the help text of its flag."""
    return field(default=default, metadata={"help": text, "choices": choices or None})


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The settings of one run. They are checked when it is made; an error names the field."""

    name: str = option("run", "name of the run; its folder is RUNS/NAME")
    runs: str = option("runs", "where run folders are made")
    workers: int = option(
        8, "processes to start on this machine; a launcher's number takes precedence"
    )
    seed: int = option(0, "seed of weights, order of batches and augmentation")
    timeout: float = option(300.0, "seconds a rank waits for the others before it gives up")

    data: str = option("", "folder with manifests (oktopk data); empty: a synthesized corpus")
    cache: str = option("", "where spectrograms are cached; empty: beside the manifests")
    augment: bool = option(True, "vary tempo and gain of the training audio")
    spoken_train: int = option(948, "training utterances of a synthesized corpus")
    spoken_test: int = option(130, "test utterances of a synthesized corpus")

    hidden: int = option(800, "width of the LSTM layers")
    layers: int = option(5, "LSTM layers")
    bidirectional: bool = option(False, "LSTMs in both directions, instead of a lookahead layer")
    channels: int = option(32, "channels of the convolutions")

    epochs: int = option(10, "passes over the training data")
    max_steps: int = option(0, "end the run after this many steps; 0: no limit")
    batch: int = option(8, "utterances per worker and backward pass")
    accumulate: int = option(1, "backward passes per step; their gradients are averaged")
    optimizer: str = option("sgd", "the optimizer", "sgd", "adamw")
    lr: float = option(0.01, "learning rate of the first epoch")
    lr_decay: float = option(1.01, "the learning rate of epoch e is lr / lr_decay^e")
    lr_warmup: int = option(0, "steps over which the learning rate rises linearly to lr")
    lr_final: float = option(1.0, "fraction of lr that a cosine schedule ends at")
    momentum: float = option(0.9, "momentum of SGD")
    weight_decay: float = option(1e-4, "weight decay of either optimizer")
    clip_before: float = option(
        0.0, "norm to which each worker clips its gradient before the exchange; 0: off"
    )
    clip_after: float = option(400.0, "norm to which the averaged gradient is clipped; 0: off")

    method: str = option("oktopk", "how gradients are exchanged", *METHODS, "auto")
    density: float = option(0.02, "fraction of the gradient that is kept")
    wire: str = option("bf16", "how entries are encoded", *get_args(CodecName))
    warmup_steps: int = option(128, "dense steps before the sparse phase")
    ramp_steps: int = option(0, "steps after the warm-up in which the density falls from 25 %")
    exact_every: int = option(32, "steps between exact thresholds over the whole model")
    bounds_every: int = option(64, "steps between updates of the region bounds")
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
    validate_batch: int = option(16, "utterances per validation batch")
    beam: int = option(0, "width of the beam search; 0: greedy decoding")
    samples: int = option(4, "decoded utterances to show")

    log_every: int = option(10, "steps between writes of the metrics, and between lines of output")
    probe_every: int = option(0, "steps between probes of the selection quality; 0: none")
    histogram_every: int = option(
        0, "steps between histograms; 0: at the start of the sparse phase and per epoch"
    )
    checkpoint_every: int = option(0, "steps between checkpoints; 0: after each epoch")
    keep: int = option(2, "checkpoints to keep")

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            check_type(spec.name, value, type(spec.default))
            choices = spec.metadata["choices"]
            if choices and value not in choices:
                raise ValueError(
                    f"{spec.name} must be one of {', '.join(choices)}, got {shown(value)}"
                )
        if not re.fullmatch(r"[\w.-]*\w", self.name) or len(self.name.encode()) > LONGEST_NAME:
            raise ValueError(
                "name must be letters, digits, '.', '_' and '-', at most "
                f"{LONGEST_NAME} bytes, got {shown(self.name)}"
            )
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        for name in ("density", "lr_final"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {shown(getattr(self, name))}")
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {shown(self.lr)}")
        for name, (least, most, why) in RANGES.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {shown(value)}")
            if value > most:
                raise ValueError(f"{name} must be at most {most:g} ({why}), got {shown(value)}")

    def _check_combinations(self) -> None:
        """Check values that depend on one another."""
        for name, value in parse_overrides(self.overrides).items():
            if name in FOR_ADAM and value is not False and self.optimizer != "adamw":
                raise ValueError(
                    f"overrides: {name}={value} is for adamw; optimizer is {self.optimizer}"
                )
        weights = 8 * self.hidden**2 * self.layers * (2 if self.bidirectional else 1)
        if weights > MOST_WEIGHTS:
            raise ValueError(
                f"hidden = {self.hidden} and layers = {self.layers} make about {weights:.1e} "
                f"weights, and at most {MOST_WEIGHTS:.1e} are possible: lower hidden or layers"
            )
        if (self.epochs - 1) * math.log(self.lr_decay) > -math.log(SMALLEST_RATE):
            raise ValueError(
                f"lr_decay = {self.lr_decay} over epochs = {self.epochs} makes the learning rate "
                "0: lower one of them"
            )


FIELDS = [spec.name for spec in fields(Config)]

# Settings that may change on resume without a flag, because the training stays the same. The data
# is checked by its content.
HARMLESS = (
    *("name", "runs", "data", "cache", "timeout", "log_every", "probe_every"),
    *("histogram_every", "checkpoint_every", "keep", "samples"),
)


def shipped() -> list[str]:
    """Names of the configs in the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load(name: str) -> Config:
    """Load a config of the package by name, or a TOML file by path."""
    path = Path(name) if name.endswith(".toml") else SHIPPED / f"{name}.toml"
    if not is_file(path):
        raise ValueError(
            f"no config {shown(name)}: give a file that ends in .toml, or one of "
            f"{', '.join(shipped())}"
        )
    return parse(read_text(path, MOST_BYTES), path.stem, str(path))


def load_run(path: Path) -> Config:
    """Load the settings in a run directory. If one is missing, the file is damaged."""
    return parse(read_text(path, MOST_BYTES), path.stem, str(path), whole=True)


def parse(text: str, name: str, path: str, whole: bool = False) -> Config:
    """The config of a TOML text. Its name is `name`, unless the text has one.

    With `whole` no field may be missing: the default would train something else.
    """
    values: dict[str, Any] = parse_toml(text, path)
    for key in values:
        if key in RENAMED:
            advice = AS_IT_WAS if whole else "rename it"
            raise file_error(path, f"{key} is now {RENAMED[key]}", advice=advice)
        if key not in FIELDS:
            raise file_error(path, f"unknown key {shown(key)}{nearest(key, FIELDS)}")
    missing = [field for field in FIELDS if field not in values]
    if whole and missing:
        raise file_error(
            path,
            f"{len(missing)} of {len(FIELDS)} settings are missing ({list_some(missing, 3)})",
            advice="add them, or start another run with --name",
        )
    values.setdefault("name", name)
    try:
        return Config(**values)
    except ValueError as error:
        raise file_error(path, str(error)) from error


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint at the present name of a renamed setting, or at the most similar known name.

    Empty when there is neither.
    """
    setting = name.lstrip("-").replace("-", "_")
    if setting in RENAMED:
        return f"; {setting} is now {RENAMED[setting]}"
    close = difflib.get_close_matches(name[:LONGEST_NAME], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def changes(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs differ, with both values."""
    both = {name: (getattr(one, name), getattr(other, name)) for name in FIELDS}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def to_toml(config: Config) -> str:
    """All fields as TOML, with the help texts as comments."""
    return "".join(
        f"# {spec.metadata['help']}\n{spec.name} = {_literal(getattr(config, spec.name))}\n"
        for spec in fields(config)
    )


def _literal(value: Any) -> str:
    """A value as JSON, which is also TOML. Not in ASCII, because TOML has no surrogate pairs."""
    return json.dumps(value, ensure_ascii=False)
