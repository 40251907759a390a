# SPDX-License-Identifier: Apache-2.0
"""Run directories with a config and metrics as the trainer would leave them, without a run."""

from __future__ import annotations

import json
from pathlib import Path

from oktopk.lab.runlog.reader import parse
from oktopk.lab.runlog.schema import Record
from oktopk.lab.train.config import Config
from oktopk.lab.train.config_files import to_toml

SECONDS = {"data": 0.01, "forward": 0.02, "backward": 0.03, "exposed": 0.02, "optimizer": 0.01}
TASK = {
    "name": "speech",
    "metrics": [
        {"name": "wer", "label": "WER"},
        {"name": "cer", "label": "CER"},
        {"name": "val_loss", "label": "validation loss"},
    ],
}
OVERLAPPED = {"select": 0.005, "exchange": 0.01, "scatter": 0.002}


def opening(size: int = 2, total: int = 8, method: str = "oktopk") -> dict:
    settings = {"method": method, "density": 0.02, "warmup_steps": 2}
    found = {"kind": "run", "step": 0, "size": size, "total_steps": total, "settings": settings}
    return found | {"task": TASK}


def step(number: int, *, loss: float | None = 3.0, sent: int = 10, warmup: int = 2) -> dict:
    phase = "dense" if number < warmup else "sparse"
    sizes = {"bytes_sent": 100 if phase == "dense" else sent, "bytes_dense": 100}
    found = {"kind": "step", "step": number, "epoch": number // 4, "loss": loss, "phase": phase}
    return found | sizes | SECONDS | OVERLAPPED | {"whole": 0.1, "skipped": loss is None}


def epoch(number: int, at: int) -> dict:
    return {"kind": "epoch", "epoch": number, "step": at, "train_loss": 2.0}


def validation(wer: float | None, at: int, **more: object) -> dict:
    rates = {"wer": wer, "cer": wer and wer / 2, "val_loss": wer and wer * 10}
    found = {"kind": "validation", "epoch": at // 4, "step": at, "metrics": rates}
    return found | {"seconds": 0.1 * (at + 1)} | more


def end(how: str = "finished", text: str = "", **totals: dict) -> dict:
    found = {"kind": "end", "how": how, "text": text}
    return found | ({"seconds": 1.0, "totals": totals} if totals else {})


def phase_sums(steps: int, sent: int, dense: int) -> dict:
    sums = {"steps": steps, "skipped": 0, "bytes_sent": sent, "bytes_dense": dense}
    return sums | {"result": 0, "numel": 0, "microseconds": steps * 100_000}


def whole_run(wer: float = 0.5, sent: int = 10, ranks: int = 2) -> list[dict]:
    """Two epochs of four steps, the first two steps dense."""
    sums = {"dense": phase_sums(2, 200 * ranks, 200 * ranks)}
    sums["sparse"] = phase_sums(6, 6 * sent * ranks, 600 * ranks)
    return [
        opening(ranks),
        *(step(i, sent=sent, loss=4.0 - i / 4) for i in range(4)),
        epoch(0, 3),
        validation(2 * wer, 3),
        *(step(i, sent=sent, loss=4.0 - i / 4) for i in range(4, 8)),
        epoch(1, 7),
        validation(wer, 7),
        end(**sums),
    ]


def lines(entries: list[dict]) -> bytes:
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def records(entries: list[dict]) -> list[Record]:
    """The typed records of some entries."""
    return [parse(json.dumps(entry).encode()) for entry in entries]


def write(folder: Path, entries: list[dict], config: Config | None = None) -> Path:
    """Write a run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(lines(entries))
    if config is not None:
        (folder / "config.toml").write_text(to_toml(config))
    return folder
