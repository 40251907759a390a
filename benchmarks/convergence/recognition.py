"""Train the speech model by `oktopk train`, as any user would, and read its metrics."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from record import Key, Record, arguments

from oktopk.runlog.aggregates import cumulative_bytes, estimated_totals
from oktopk.runlog.reader import read_runlog

# task -> config
CONFIGS = {"spoken": "quickstart", "an4": "compact"}
# the configs have AdamW's
RATES = {"sgd": {"lr": "0.003"}}


def train(key: Key, folder: Path, an4: Path | None) -> Record:
    """One run; its folder is beside the records and is resumed when it was cut short."""
    name = key.path(folder).stem.replace("+", "_")  # `oktopk train` takes no `+`
    base, more = arguments(key.setting)
    flags = {
        "config": CONFIGS[key.task],
        "name": name,
        "runs": str(folder),
        "workers": str(key.workers),
        "optimizer": key.optimizer,
        "seed": str(key.seed),
        "method": "dense" if base == "dense" else "oktopk",
        "remedies": "none" if base == "plain" else "auto",
        "validate_every": "1",
    }
    flags |= RATES.get(key.optimizer, {})
    if base == "plain":
        flags["ramp_steps"] = "0"
    if key.task == "an4":
        flags["data"] = str(an4)
    if key.steps:
        flags["max_steps"] = str(key.steps)
    flags |= more
    given = [
        part for flag, value in flags.items() for part in (f"--{flag.replace('_', '-')}", value)
    ]
    resume = ["--resume"] if (folder / name).exists() else []
    subprocess.run([sys.executable, "-m", "oktopk", "train", *given, *resume], check=True)
    return _record(key, folder / name)


def _record(key: Key, folder: Path) -> Record:
    """What a run did; bytes are those of all ranks."""
    run = read_runlog(folder)
    sent = dict(zip((step.step for step in run.steps), cumulative_bytes(run), strict=True))
    return Record(
        key=key,
        measure="WER",
        higher_is_better=False,
        curve=[
            (e.step + 1, e.wer, round(sent[e.step])) for e in run.validated if e.wer is not None
        ],
        dense_bytes=estimated_totals(run).whole.bytes_dense,
        seconds=sum(step.whole or 0.0 for step in run.steps),
    )
