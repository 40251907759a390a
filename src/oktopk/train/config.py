"""`Config`: every setting of a run, from a TOML file and flags.

The defaults are the reference's settings for lstman4; a file in `configs/` holds only what it
changes. Every field is a flag too. A name nobody knows is refused with the nearest one that is.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from oktopk.methods import METHODS
from oktopk.settings import Scope
from oktopk.train.bounds import (
    LONGEST_NAME,
    MOST_WEIGHTS,
    RANGES,
    SMALLEST_RATE,
    check_type,
    shown,
)
from oktopk.utils.files import (
    file_error,
    is_file,
    parse_toml,
    read_text,
)
from oktopk.utils.units import few
from oktopk.wire.codec import CodecName

SHIPPED = Path(__file__).parent / "configs"
DEFAULT = "quickstart"
MOST_BYTES = 2**20
"""Of a config: far more than all settings take."""


SWITCH = ("remedies", "on", "off")  # remedies: as they say


def option(default: Any, text: str, *choices: str) -> Any:
    """A field with the help text of its flag."""
    return field(default=default, metadata={"help": text, "choices": choices or None})


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One run. Checked when it is made; an error names the field and its value."""

    name: str = option("run", "name of the run; its folder is RUNS/NAME")
    runs: str = option("runs", "where run folders are made")
    workers: int = option(8, "processes to start here; a launcher's own number goes before")
    seed: int = option(0, "of weights, order of batches and augmentation")
    timeout: float = option(300.0, "seconds a rank waits for the others before it gives up")

    data: str = option("", "folder with manifests (oktopk data); empty: a corpus is spoken")
    cache: str = option("", "where spectrograms are cached; empty: beside the manifests")
    augment: bool = option(True, "vary tempo and gain of the training audio")
    spoken_train: int = option(948, "training utterances of a spoken corpus")
    spoken_test: int = option(130, "test utterances of a spoken corpus")

    hidden: int = option(800, "width of the LSTM layers")
    layers: int = option(5, "LSTM layers")
    bidirectional: bool = option(False, "LSTMs in both directions, instead of the lookahead")
    channels: int = option(32, "channels of the convolutions")

    epochs: int = option(10, "passes over the training data")
    max_steps: int = option(0, "stop after so many steps; 0: only epochs count")
    batch: int = option(8, "utterances per worker and backward pass")
    accumulate: int = option(1, "backward passes per step; their gradients are averaged")
    optimizer: str = option("sgd", "the optimizer", "sgd", "adamw")
    lr: float = option(0.01, "learning rate of the first epoch")
    lr_decay: float = option(1.01, "epoch e has the rate lr / lr_decay^e")
    lr_warmup: int = option(0, "steps over which the rate rises linearly to lr")
    lr_final: float = option(1.0, "the rate goes down to this fraction over the run, by a cosine")
    momentum: float = option(0.9, "of SGD")
    weight_decay: float = option(1e-4, "of either optimizer")
    clip_before: float = option(0.0, "norm each worker clips to before the exchange; 0: off")
    clip_after: float = option(400.0, "norm all clip to after the exchange; 0: off")

    method: str = option("oktopk", "how gradients are exchanged", *METHODS, "auto")
    density: float = option(0.02, "fraction of the gradient that is kept")
    wire: str = option("bf16", "how entries travel", *get_args(CodecName))
    warmup_steps: int = option(128, "dense steps before the sparse phase")
    ramp_steps: int = option(0, "steps after them in which the density falls from 25 %")
    exact_every: int = option(32, "steps between exact thresholds over the whole model")
    bounds_every: int = option(64, "steps between agreements on the region bounds")
    scope: str = option("model", "choose from the whole model or every bucket", *get_args(Scope))
    remedies: str = option("auto", "what suits the optimizer, or plain feedback", "auto", "none")
    beta1: float = option(-1.0, "cap on Adam's first beta when sparse; -1: leave it")
    advance: float = option(-1.0, "share of a sum delivered ahead; -1: as remedies say")
    late_moments: str = option("remedies", "Adam takes a late sum as many gradients", *SWITCH)
    follow_rate: str = option("remedies", "residuals follow the learning rate", *SWITCH)

    validate_every: int = option(5, "epochs between validations; first and last always")
    validate_batch: int = option(16, "utterances per validation batch")
    beam: int = option(0, "width of the beam search; 0: greedy decoding")
    samples: int = option(4, "decoded utterances to show beside their references")

    log_every: int = option(10, "steps between writes of the metrics, and lines without terminal")
    probe_every: int = option(0, "steps between probes of what selection missed; 0: none")
    histogram_every: int = option(0, "steps between histograms; 0: at activation and per epoch")
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
        self._check_together()

    def _check_ranges(self) -> None:
        for name in ("density", "lr_final"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {shown(getattr(self, name))}")
        if not (self.beta1 == -1 or 0 <= self.beta1 < 1):
            raise ValueError(f"beta1 must be in [0, 1), or -1, got {shown(self.beta1)}")
        if not (self.advance == -1 or 0 <= self.advance <= 1):
            raise ValueError(f"advance must be in [0, 1], or -1, got {shown(self.advance)}")
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {shown(self.lr)}")
        for name, (least, most, why) in RANGES.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {shown(value)}")
            if value > most:
                raise ValueError(f"{name} must be at most {most:g} ({why}), got {shown(value)}")

    def _check_together(self) -> None:
        """What single values do not tell."""
        for_adam = {"beta1": self.beta1 != -1, "late_moments": self.late_moments == "on"}
        for name in (name for name, is_set in for_adam.items() if is_set):
            if self.optimizer != "adamw":
                value = f"{name} = {getattr(self, name)}"
                raise ValueError(f"{value} is for adamw; optimizer is {self.optimizer}")
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

# What may change when a run is resumed, for the training stays the same. Whether the data is the
# same is seen from its content.
HARMLESS = (
    *("name", "runs", "data", "cache", "timeout", "log_every", "probe_every"),
    *("histogram_every", "checkpoint_every", "keep", "samples"),
)


def shipped() -> list[str]:
    """Names of the configs that come along."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load(name: str) -> Config:
    """A config that comes along, by name, or a TOML file, by path."""
    path = Path(name) if name.endswith(".toml") else SHIPPED / f"{name}.toml"
    if not is_file(path):
        raise ValueError(
            f"no config {shown(name)}: give a file that ends in .toml, or one of "
            f"{', '.join(shipped())}"
        )
    return parse(read_text(path, MOST_BYTES), path.stem, str(path))


def load_run(path: Path) -> Config:
    """The settings that a run wrote into its folder: all of them, or the file is damaged."""
    return parse(read_text(path, MOST_BYTES), path.stem, str(path), whole=True)


def parse(text: str, name: str, path: str, whole: bool = False) -> Config:
    """The config of a TOML text; `name` unless it has one of its own.

    With `whole` no field may be missing: a default in the place of a lost one would train something
    else.
    """
    values: dict[str, Any] = parse_toml(text, path)
    for key in values:
        if key not in FIELDS:
            raise file_error(path, f"unknown key {shown(key)}{nearest(key, FIELDS)}")
    missing = [field for field in FIELDS if field not in values]
    if whole and missing:
        raise file_error(
            path,
            f"{len(missing)} of {len(FIELDS)} settings are missing ({few(missing, 3)})",
            advice="add them, or start another run with --name",
        )
    values.setdefault("name", name)
    try:
        return Config(**values)
    except ValueError as error:
        raise file_error(path, str(error)) from error


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint at what was meant; empty when nothing is near."""
    close = difflib.get_close_matches(name[:LONGEST_NAME], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def changes(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs differ, with both values."""
    both = {name: (getattr(one, name), getattr(other, name)) for name in FIELDS}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def to_toml(config: Config) -> str:
    """All fields as TOML, help texts as comments."""
    return "".join(
        f"# {spec.metadata['help']}\n{spec.name} = {_literal(getattr(config, spec.name))}\n"
        for spec in fields(config)
    )


def _literal(value: Any) -> str:
    """A value as JSON, which is TOML too. Not in ASCII: TOML has no surrogate pairs."""
    return json.dumps(value, ensure_ascii=False)


def add_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """A flag for every field; one that is not given leaves the config's value."""
    for spec in fields(Config):
        if spec.name in without:
            continue
        kind = type(spec.default)
        how: dict[str, Any] = {"type": kind, "choices": spec.metadata["choices"]}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif how["choices"] is None:
            how["metavar"] = spec.name.rsplit("_", 1)[-1].upper()
        parser.add_argument(
            f"--{spec.name.replace('_', '-')}",
            default=argparse.SUPPRESS,
            help=f"{spec.metadata['help']} ({spec.default!r})".replace("%", "%%"),
            **how,
        )


def as_flag(name: str, value: Any) -> list[str]:
    """The words that set a field on the command line."""
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    return [f"--{dashed}", str(value)]


def given(args: argparse.Namespace) -> list[str]:
    """The fields that were set on the command line."""
    return [name for name in FIELDS if name in vars(args)]


def with_flags(config: Config, args: argparse.Namespace) -> Config:
    """The config with what was given on the command line."""
    return replace(config, **{name: getattr(args, name) for name in given(args)})
