"""Train the speech model with `oktopk train`, and read its metrics."""

from __future__ import annotations

import argparse
from pathlib import Path

from record import Key, Record, arguments

from oktopk.errors import RunError
from oktopk.runlog.aggregates import cumulative_bytes, estimated_totals
from oktopk.runlog.reader import RunLog
from oktopk.train.config import Config, load
from oktopk.train.flags import add_flags, as_flag, with_flags
from oktopk.train.preset_options import NAMES
from oktopk.train.run_process import train_in_process

# config by task
CONFIGS = {"spoken": "quickstart", "an4": "compact"}
# learning rates of the configs are those of AdamW
LEARNING_RATES = {"sgd": {"lr": "0.003"}}


def train(key: Key, folder: Path, an4: Path | None) -> Record:
    """Train one run, or resume it if it was interrupted. Its directory is beside the records."""
    result = train_in_process(config_of(key, folder, an4), CONFIGS[key.task])
    if result.exit_code:
        raise RunError(f"{key} failed with exit code {result.exit_code}")
    return _record(key, result.runlog)


def config_of(key: Key, folder: Path, an4: Path | None) -> Config:
    """The training config of a run."""
    base, more = arguments(key.setting)
    settings = {
        "name": key.path(folder).stem.replace("+", "_"),  # names of runs have no `+`
        "runs": str(folder),
        "workers": str(key.workers),
        "optimizer": key.optimizer,
        "seed": str(key.seed),
        "method": "dense" if base == "dense" else "oktopk",
        "preset": "none" if base == "plain" else "auto",
        "validate_every": "1",
    }
    settings |= LEARNING_RATES.get(key.optimizer, {})
    if base == "plain":
        settings["ramp_steps"] = "0"
    if key.task == "an4":
        settings["data"] = str(an4)
    if key.steps:
        settings["max_steps"] = str(key.steps)
    overrides = {name: more.pop(name) for name in list(more) if name in NAMES}
    settings["overrides"] = ",".join(f"{name}={value}" for name, value in overrides.items())
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = [word for name, text in (settings | more).items() for word in as_flag(name, text)]
    return with_flags(load(CONFIGS[key.task]), parser.parse_args(words))


def _record(key: Key, run: RunLog) -> Record:
    """The record of a run. Bytes are those of all ranks."""
    sent = dict(zip((step.step for step in run.steps), cumulative_bytes(run), strict=True))
    return Record(
        key=key,
        measure="WER",
        higher_is_better=False,
        curve=[
            (v.step + 1, v.metrics["wer"], round(sent[v.step]))
            for v in run.validations
            if v.metrics["wer"] is not None
        ],
        dense_bytes=estimated_totals(run).whole.bytes_dense,
        seconds=sum(step.whole or 0.0 for step in run.steps),
    )
