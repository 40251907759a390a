# SPDX-License-Identifier: Apache-2.0
"""The plan of a sweep, which a later call must match to continue it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from oktopk.compare.plan import SWEEP
from oktopk.errors import RunError
from oktopk.sweep.space import Range
from oktopk.train.config import Config, as_dict
from oktopk.train.run_process import IRRELEVANT_SETTINGS
from oktopk.train.tasks.base import Metric
from oktopk.utils.files import read_json, write_atomically


class StoredPlan(msgspec.Struct, frozen=True):
    """`sweep.json`: what must be the same in a later call."""

    metric: str
    space: dict[str, Range]
    config: dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is searched: the ranges, the config for everything else, and the metric."""

    config: str
    base: Config
    space: dict[str, Range]
    metric: Metric

    @property
    def folder(self) -> Path:
        return Path(self.base.runs)

    def of(self, values: dict[str, Any], name: str) -> Config:
        """The config of a trial."""
        return replace(self.base, name=name, **values)


def store_or_compare(plan: Plan) -> None:
    """Store the plan; if there is one already, raise unless it is the same."""
    path = plan.folder / SWEEP
    own = {name: v for name, v in as_dict(plan.base).items() if name not in IRRELEVANT_SETTINGS}
    now = StoredPlan(plan.metric.name, plan.space, own)
    if not path.exists():
        write_atomically(path, json.dumps(msgspec.to_builtins(now), indent=1) + "\n")
        return
    before = read_json(path, StoredPlan, advice="move the folder away, or give another --name")
    flat_before, flat_now = (
        {"metric": each.metric} | each.config | {name: str(one) for name, one in each.space.items()}
        for each in (before, now)
    )
    for name in flat_before.keys() | flat_now.keys():
        old, new = flat_before.get(name), flat_now.get(name)
        if old != new:
            raise RunError(
                f"{plan.folder} is a sweep with {name} {old}, and this is {new}: give another "
                "--name, or the flags of that sweep"
            )
