"""What a sweep is, and whether a later call goes on with the same."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from oktopk.compare.plan import SWEEP
from oktopk.errors import RunError
from oktopk.sweep.space import Range
from oktopk.train.config import Config
from oktopk.train.run_process import NO_MATTER
from oktopk.utils.files import read_json, write_whole


class Stored(msgspec.Struct, frozen=True):
    """`sweep.json`: what a later call must have alike."""

    metric: str
    space: dict[str, Range]
    config: dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep is: the same in every call that goes on with it."""

    config: str
    base: Config
    space: dict[str, Range]
    metric: str

    @property
    def folder(self) -> Path:
        return Path(self.base.runs)

    def of(self, values: dict[str, Any], name: str) -> Config:
        """The config of a trial."""
        return replace(self.base, name=name, **values)


def remember(plan: Plan) -> None:
    """Write the plan down, or see that it is the one that was written down."""
    path = plan.folder / SWEEP
    own = {name: v for name, v in asdict(plan.base).items() if name not in NO_MATTER}
    now = Stored(plan.metric, plan.space, own)
    if not path.exists():
        write_whole(path, json.dumps(msgspec.to_builtins(now), indent=1) + "\n")
        return
    before = read_json(path, Stored, advice="move the folder away, or give another --name")
    flat_before, flat_now = (
        {"metric": each.metric} | each.config | {name: str(one) for name, one in each.space.items()}
        for each in (before, now)
    )
    for name in flat_before.keys() | flat_now.keys():
        old, new = flat_before.get(name), flat_now.get(name)
        if old != new:
            raise RunError(
                f"{plan.folder} is a sweep with {name} {old}, and this is {new}: give another "
                "--name, or the flags of then"
            )
