"""`metrics.jsonl`: one object per step and per epoch, written as they end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class Journal:
    """Appends objects to a file, from byte `start` on: a resumed run writes anew what follows."""

    def __init__(self, path: Path, start: int = 0) -> None:
        written = path.read_bytes()[:start] if path.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]  # a line may have been cut off
        self._file = path.open("a")
        self._file.truncate(len(whole))

    @property
    def bytes(self) -> int:
        """How much is written."""
        return self._file.tell()

    def write(self, *entries: dict[str, Any]) -> None:
        self._file.write("".join(_line(entry) for entry in entries))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(finite(entry), allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """JSON has no NaN: what is not a number becomes null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
