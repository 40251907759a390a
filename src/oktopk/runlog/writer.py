# SPDX-License-Identifier: Apache-2.0
"""`RunLogWriter`: appends records to `metrics.jsonl`, one line of JSON for each."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import msgspec

from oktopk.runlog.schema import Record

log = logging.getLogger("oktopk.runlog")


class RunLogWriter:
    """Appends records to a file after its first `start` bytes.

    A resumed run continues at the byte that its checkpoint names: what was written after the
    checkpoint is cut off, because the run writes it again.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        written = path.read_bytes()[:start] if path.exists() else b""
        complete = written[: written.rfind(b"\n") + 1]  # the last line may be unfinished
        if len(complete) < start:
            log.warning(
                "%s is damaged: it has %d of the %d bytes that were in it at the checkpoint. The "
                "training is not affected; the steps that were in the rest are missing from "
                "reports",
                path,
                len(complete),
                start,
            )
        self._file = path.open("a")
        self._file.truncate(len(complete))
        self._file.seek(len(complete))  # else the old end is reported until something is written

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self._file.tell()

    def write(self, *records: Record) -> None:
        """Write all records and flush them to the operating system."""
        self._file.write("".join(encode(record) for record in records))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def encode(record: Record) -> str:
    """The line of a record. Numbers that are not finite become null, as JSON has no others."""
    return json.dumps(_finite(msgspec.to_builtins(record)), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
