"""Train the speech model by `oktopk train`, as any user would, and read its metrics."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from record import Key, Record, arguments

from oktopk.compare.results import bytes_so_far, totals
from oktopk.runlog.reader import read

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
    run = read(folder)
    sent = dict(zip((entry["step"] for entry in run.steps), bytes_so_far(run), strict=True))
    return Record(
        key=key,
        measure="WER",
        higher_is_better=False,
        curve=[(e["step"] + 1, e["wer"], round(sent[e["step"]])) for e in run.validated],
        dense_bytes=sum(part["bytes_dense"] for part in totals(run).values()),
        seconds=sum(entry["whole"] for entry in run.steps),
    )
