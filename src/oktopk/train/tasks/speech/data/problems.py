# SPDX-License-Identifier: Apache-2.0
"""`DataError`: all problems with the data in one message, before training starts."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from oktopk.utils.extras import require
from oktopk.utils.files import FileError

SHOWN = 20


class DataError(FileError):
    """Data that cannot be trained on. `problems` has one line for each thing to repair."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__(self._message())

    def _message(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = [f"{len(self.problems)} problems with the data:"]
        lines += [f"  {problem}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  ... and {len(self.problems) - SHOWN} more")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[type[DataError], tuple[list[str]]]:
        return DataError, (self.problems,)  # so that it crosses processes


def extra(module: str) -> Any:
    """A module of the `train` extra, or an error that says how to install it."""
    require("reading and writing recordings", module)
    return import_module(module)
