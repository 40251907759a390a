"""The record of a run on disk, from which the table is made, and by which a run is not repeated."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

BASES = ("dense", "plain", "auto")
WORKERS = 4  # unless something else is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """What identifies a run."""

    task: str
    optimizer: str
    setting: str
    seed: int
    workers: int
    steps: int
    """0: as many as the task asks for."""

    def path(self, folder: Path) -> Path:
        setting = self.setting.replace("=", "").replace(",", "+")
        name = f"{self.task}-{self.optimizer}-{setting}-s{self.seed}-p{self.workers}-n{self.steps}"
        return folder / f"{name}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The result of a run. `curve` has (step, metric, bytes sent by all ranks so far)."""

    key: Key
    measure: str
    higher_is_better: bool
    curve: list[tuple[int, float, int]] = field(default_factory=list)
    dense_bytes: int = 0
    """Bytes that dense training would have sent."""

    seconds: float = 0.0

    @property
    def share(self) -> float:
        """Bytes sent over dense bytes, warm-up included."""
        return self.curve[-1][2] / self.dense_bytes if self.dense_bytes else 1.0

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = self.key.path(folder)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)))
        os.replace(draft, path)


def read(path: Path) -> Record:
    found = json.loads(path.read_text())
    curve = [tuple(point) for point in found.pop("curve")]
    return Record(key=Key(**found.pop("key")), curve=curve, **found)


def arguments(setting: str) -> tuple[str, dict[str, str]]:
    """`"auto,density=0.01"` -> `("auto", {"density": "0.01"})`."""
    base, *pairs = setting.split(",")
    if base not in BASES:
        raise ValueError(f"a setting begins with one of {', '.join(BASES)}, got {setting!r}")
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise ValueError(f"an argument is name=value, got {wrong[0]!r} in {setting!r}")
    return base, dict(pair.split("=", 1) for pair in pairs)
