# SPDX-License-Identifier: Apache-2.0
"""What an odd input is made of, and what may come of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch.distributed as dist

from oktopk import cli
from oktopk.lab.tasks.speech.recordings import DataError
from torture import odd

WRONG = (ValueError, TypeError)

DATA = (DataError, OSError)  # what `oktopk data` and `oktopk train` tell in a line


class LostError(Exception):
    """What was there before the input is gone."""


@dataclass(slots=True)
class Input:
    """An odd input: what it is, what reads it, and what may come of it."""

    what: str
    call: Callable[[], Any]
    allowed: tuple[type[BaseException], ...]
    names: tuple[str, ...] = field(default=())
    """One of these must be in the message."""


@dataclass(frozen=True, slots=True)
class Desk:
    """Where an input is made: seeded numbers, whole files to spoil, a folder to do it in."""

    rng: Random
    base: Path
    folder: Path

    def spoilt(self, source: str, name: str = "") -> Path:
        """A copy of a file of the base, with damage."""
        path = self.folder / (name or Path(source).name)
        path.write_bytes(odd.spoilt(self.rng, (self.base / source).read_bytes()))
        return path


def command(words: list[str]) -> Input:
    def call() -> None:
        sys.argv = ["oktopk", *words]
        cli.main()

    return Input(" ".join(["oktopk", *words]), call, ())


@cache
def group() -> None:
    """A process group of this process alone, made once."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
